"""Operators by name: `ns::op` for all of its overloads, `ns::op.overload` for one."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...torch_compat.ops import default_overload


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


ALLOCATIONS = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, "new_empty", "new_empty_strided"}
)


def overload_of(node: Node) -> Any:
    """The overload that a node calls, which must call an op."""
    op: Any = node.target
    return default_overload(op) if isinstance(op, torch._ops.OpOverloadPacket) else op


def op_names(node: Node) -> frozenset[str]:
    """The names by which `splitting_ops` may call a node: `ns::op` and `ns::op.overload`."""
    if not is_op(node.target):
        return frozenset()
    return frozenset({op_name(node.target), overload_name(node.target)})
