"""A model's forward in the form that a recorder can break into segments.

A compiled model is linked with each piece as one operation and each splitting op as a break. The
forward of one that is not traced runs as it is (breakable capture): what it calls decorated with
`break_graph` breaks, and so do the splitting ops by name, wherever they are called from. Code that
Inductor has cut calls them too, between partitions that are one operation each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from ...compile.backends.partition import partitions_through
from ...compile.lower.codegen import resolve_op
from ...compile.lower.compiled_model import CompiledModel
from .recorder import break_graph, opaque_piece


def recordable(compiled: CompiledModel, splitting_ops: Sequence[str]) -> Callable[..., Any]:
    """The function to record: of the plan's input tensors, to its results."""
    partition_ops = compiled.plan.partition_ops
    if compiled.traced and not partition_ops:
        return compiled.link(
            piece_hook=lambda use, piece: opaque_piece(piece),
            call_hook=lambda use, op: break_graph(op),
        )
    forward, ops = compiled.link(), frozenset(map(resolve_op, partition_ops or splitting_ops))

    def breaking(*inputs: Any) -> Any:
        with _BreakAt(ops), partitions_through(opaque_piece):
            return forward(*inputs)

    return breaking


class _BreakAt(TorchFunctionMode):
    """Makes every call of some operators a break. Operators called by name arrive as packets."""

    def __init__(self, ops: frozenset[Any]) -> None:
        super().__init__()
        self._breaking = {op: break_graph(op) for op in ops}
        self._breaking |= {op.overloadpacket: call for op, call in self._breaking.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._breaking.get(func, func)(*args, **(kwargs or {}))
