"""Compare a compiled piece with its graph by running both on generated inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...torch_compat.basics.distributed import without_other_ranks
from ...torch_compat.basics.ops import OpOverload
from ...torch_compat.basics.tensors import FakeTensorMode, LightDispatchMode, tree_map_only
from ..ir.compilation import PieceFn
from ..ir.ops import FilledMemory, clones, resolve_op, tensors_in, where_written, written_by
from ..pieces.piece import HANDLE
from ..trace.symbols import Sizes, input_at
from .tolerance import compare


def numeric_difference(
    fn: PieceFn, graph: GraphModule, sizes: Sizes, cut_at: Sequence[str] = ()
) -> str | None:
    """How the results of `fn` differ from those of `graph` at `sizes`, or why that is not known;
    None if they are equal.

    Floating-point inputs are small random numbers. All others are zero, since an index of zero is
    in range for any table. Memory that the piece allocates and does not write, for a splitting op
    to fill, is not compared: there the graph gives what the allocation was filled with. The
    splitting ops `cut_at` inside run `WithoutStep`.
    """
    with without_other_ranks(), WithoutStep(map(resolve_op, cut_at)):
        return _difference(fn, graph, sizes)


class WithoutStep(LightDispatchMode):
    """Stands in this thread for calls of splitting ops, which may need a running step: where they
    write and what they return is 0.5, or zero if that is no floating-point tensor."""

    def __init__(self, ops: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops = frozenset(ops)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return _made_up(func, args, given) if func in self._ops else func(*args, **given)


def _made_up(op: OpOverload, args: Any, kwargs: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        result = op(*fakes[0], **fakes[1])
    device = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
    made = tree_map_only(
        Tensor, lambda each: torch.empty_strided(
            each.shape, each.stride(), dtype=each.dtype, device=device
        ), result,
    )  # fmt: skip
    for tensor in (*written_by(op, args, kwargs), *tensors_in(made)):
        tensor.fill_(0.5 if tensor.is_floating_point() else 0)
    return made


def _difference(fn: PieceFn, graph: GraphModule, sizes: Sizes) -> str | None:
    inputs = concrete_inputs(graph, sizes)

    def run(fill: int = 0) -> list[Any]:
        return list(FilledMemory(graph, fill).run(*clones(inputs)))

    with torch.no_grad():
        zeros, ones = run(), run(1)
        got = [*fn(clones(inputs))]
        for index, (one, expected, other) in enumerate(zip(got, zeros, ones, strict=True)):
            if not isinstance(expected, Tensor):
                continue
            if one.shape != expected.shape or one.dtype is not expected.dtype:
                return f"result {index} is {tuple(one.shape)} instead of {tuple(expected.shape)}"
            # a tensor on the meta device has no values to compare
            got[index] = expected if expected.is_meta else where_written(expected, other, one)
        wrong = compare(zeros, got, run)
    if wrong is None:
        return None
    if wrong.unknown:
        return f"result {wrong.result} cannot be compared: {wrong.unknown}"
    one, expected = got[wrong.result], zeros[wrong.result]
    if not isinstance(expected, Tensor):
        return f"result {wrong.result} is {one} instead of {expected}"
    apart = (one.double() - expected.double()).abs().max().item()
    return f"result {wrong.result} is off by {apart:.3g}"


def concrete_inputs(graph: GraphModule, sizes: Sizes) -> list[Any]:
    """Generated inputs with the shapes and dtypes of the graph's inputs at `sizes`.

    A handle of the model has its own value: an op would follow an address of zero.
    """
    return [_generated(node, sizes) for node in graph.graph.find_nodes(op="placeholder")]


def _generated(node: Node, sizes: Sizes) -> Any:
    if (handle := node.meta.get(HANDLE)) is not None:
        return handle.clone()
    value = input_at(node, sizes)
    if not isinstance(value, Tensor):
        return value
    return value.normal_(std=0.1) if value.dtype.is_floating_point else value.zero_()
