"""A whole graph whose code Inductor cuts: each partition is one operation of a recording.

Inductor cuts after it has fused and planned memory, so nothing is computed twice around a splitting
op and buffers are reused across it. Its code calls the partitions and, between them, the splitting
ops. Which callable a partition is was settled when the code was loaded, and a recording begins long
after: a partition therefore looks at each call whether somebody wants it in another form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from ...errors import NotPartitioned
from ...torch_compat.ops import is_decomposed
from ...torch_compat.partition import Partitions, inductor_partitions
from ..ir.compilation import Blobs, Finish, PieceFn
from ..ir.ops import resolve_op
from .registry import Compiler

PartitionHook = Callable[[PieceFn], PieceFn]
PARTITION_OPS = "custom_should_partition_ops"

_HOOK: ContextVar[PartitionHook | None] = ContextVar("piecegraph_partitions", default=None)


@dataclass(frozen=True, slots=True)
class PartitionedPiece:
    """A piece in as many `partitions`."""

    fn: PieceFn
    partitions: int

    def __call__(self, args: list[Any]) -> Any:
        return self.fn(args)


def partitions_of(piece: PieceFn) -> int:
    """In how many partitions the code of a piece is; 0 if Inductor was not to cut it."""
    return piece.partitions if isinstance(piece, PartitionedPiece) else 0


@contextmanager
def partitions_through(hook: PartitionHook) -> Iterator[None]:
    """Inside the block, in this thread, `hook(partition)` is called where a partition would be."""
    token = _HOOK.set(hook)
    try:
        yield
    finally:
        _HOOK.reset(token)


def partition_options(ops: Sequence[str]) -> dict[str, Any]:
    """Inductor's options for cutting its code at `ops`; its C++ wrapper knows no partitions."""
    return {"graph_partition": True, "cpp_wrapper": False, PARTITION_OPS: list(ops)}


def partitioning(compiler: Compiler) -> Compiler:
    """`compiler`, which must be a form of Inductor, with code that is in partitions.

    Its `compile` raises NotPartitioned where Inductor cuts at other places than it was told.
    """

    def compile_piece(graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]) -> Finish:
        with inductor_partitions(_hooked) as made:
            finish = compiler.compile(graph, inputs, options)
        _check(made, options[PARTITION_OPS])

        def finish_partitioned() -> tuple[PieceFn, Blobs]:
            fn, blobs = finish()
            return PartitionedPiece(fn, made.count), blobs

        return finish_partitioned

    def load(artifacts: Sequence[Blobs]) -> list[PieceFn]:
        """One after the other, to know the partitions of each."""
        assert compiler.load is not None
        loaded: list[PieceFn] = []
        for blobs in artifacts:
            with inductor_partitions(_hooked) as made:
                (fn,) = compiler.load([blobs])
            loaded.append(PartitionedPiece(fn, made.count))
        return loaded

    return replace(compiler, compile=compile_piece, load=load if compiler.load else None)


def _hooked(partition: PieceFn) -> PieceFn:
    def unspent(args: list[Any]) -> Any:
        """The partition empties the list that it is given; a replay gives the same one again."""
        return partition(list(args))

    def call(args: list[Any]) -> Any:
        hook = _HOOK.get()
        return partition(args) if hook is None else hook(unspent)(args)

    return call


def _check(made: Partitions, ops: Sequence[str]) -> None:
    """What runs outside of partitions is not captured, so it must be splitting ops alone.

    An op that is not there because nobody needs what it does is no reason to refuse.
    """
    if not made.count:
        raise NotPartitioned(reason="it made no partitions")
    for name, why in made.left_out.items():
        raise NotPartitioned(reason=f"{name} is in no partition ({why})")
    for name in sorted(set(ops) - made.cut_at):
        if name in made.alive or is_decomposed(resolve_op(name)):
            raise NotPartitioned(reason=f"its code has no call of {name}")
