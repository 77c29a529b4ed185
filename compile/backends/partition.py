"""Let Inductor partition the code of the whole graph at the splitting ops.

Inductor partitions after fusion and memory planning, so nothing is computed twice around a
splitting op and buffers are reused across it. The generated code calls the partitions and, between
them, the splitting ops. It is bound to its partitions when it is loaded, long before a capture
starts, so each call of a partition checks a context variable for a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from ...errors import NotPartitioned
from ...torch_compat.basics.ops import is_decomposed
from ...torch_compat.compiling.partition import Partitions, inductor_partitions
from ..ir.compilation import Blobs, Built, Compiler, PieceFn
from ..ir.ops import resolve_op

PartitionHook = Callable[[PieceFn], PieceFn]
PARTITION_OPS = "custom_should_partition_ops"

_HOOK: ContextVar[PartitionHook | None] = ContextVar("piecegraph_partitions", default=None)


@dataclass(frozen=True, slots=True)
class PartitionedPiece:
    """A piece whose code has that many `partitions`."""

    fn: PieceFn
    partitions: int

    def __call__(self, args: list[Any]) -> Any:
        return self.fn(args)


def partitions_of(piece: PieceFn) -> int:
    """Number of partitions of a piece's code; 0 if Inductor did not partition it."""
    return piece.partitions if isinstance(piece, PartitionedPiece) else 0


@contextmanager
def partitions_through(hook: PartitionHook) -> Iterator[None]:
    """In this block and thread, call `hook(partition)` in place of each partition."""
    token = _HOOK.set(hook)
    try:
        yield
    finally:
        _HOOK.reset(token)


def partition_options(ops: Sequence[str]) -> dict[str, Any]:
    """Inductor's options for partitioning at `ops`; its C++ wrapper cannot partition."""
    return {"graph_partition": True, "cpp_wrapper": False, PARTITION_OPS: list(ops)}


def partitioning(compiler: Compiler) -> Compiler:
    """`compiler`, a form of Inductor, made to partition its code.

    Its `compile` raises NotPartitioned if Inductor partitions at other places than the given ops.
    """

    def compile_piece(graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]) -> Built:
        with inductor_partitions(_hooked) as partitions:
            fn, blobs = compiler.compile(graph, inputs, options)
        _check(partitions, options[PARTITION_OPS])
        return PartitionedPiece(fn, partitions.count), blobs

    def load(artifacts: Sequence[Blobs]) -> list[PieceFn]:
        """Load one after the other, to count the partitions of each."""
        assert compiler.load is not None
        loaded: list[PieceFn] = []
        for blobs in artifacts:
            with inductor_partitions(_hooked) as partitions:
                (fn,) = compiler.load([blobs])
            loaded.append(PartitionedPiece(fn, partitions.count))
        return loaded

    loads = load if compiler.load else None
    return replace(compiler, compile=compile_piece, load=loads, in_workers=False)


def _hooked(partition: PieceFn) -> PieceFn:
    def with_copy(args: list[Any]) -> Any:
        """A copy of the list: a partition empties its argument, a replay passes it again."""
        return partition(list(args))

    def call(args: list[Any]) -> Any:
        hook = _HOOK.get()
        return partition(args) if hook is None else hook(with_copy)(args)

    return call


def _check(partitions: Partitions, ops: Sequence[str]) -> None:
    """Raise NotPartitioned unless only splitting ops are outside the partitions.

    Code outside partitions is not captured. A dead splitting op, which Inductor removes, is fine.
    """
    if not partitions.count:
        raise NotPartitioned(reason="it made no partitions")
    for name, why in partitions.left_out.items():
        raise NotPartitioned(reason=f"{name} is in no partition ({why})")
    for name in sorted(set(ops) - partitions.cut_at):
        if name in partitions.alive or is_decomposed(resolve_op(name)):
            raise NotPartitioned(reason=f"its code has no call of {name}")
