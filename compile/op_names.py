"""Operators by name: `ns::op` for all of its overloads, `ns::op.overload` for one."""

from __future__ import annotations

from typing import Any

import torch


def is_op(target: Any) -> bool:
    return isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def is_custom(target: Any) -> bool:
    """Whether it is an operator that is not one of torch's own."""
    return is_op(target) and not op_name(target).startswith(("aten::", "prims::"))


def op_name(op: Any) -> str:
    return str(_packet(op)._qualified_op_name)


def overloads(op: Any) -> list[Any]:
    """All overloads of the operator, of which `op` may be one."""
    packet = _packet(op)
    return [getattr(packet, name) for name in packet.overloads()]


def overload_name(op: Any) -> str:
    """The name of an overload; of the default one where none is chosen."""
    chosen = op._overloadname if isinstance(op, torch._ops.OpOverload) else "default"
    return f"{op_name(op)}.{chosen}"


def _packet(op: Any) -> Any:
    return op.overloadpacket if isinstance(op, torch._ops.OpOverload) else op
