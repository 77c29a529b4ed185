"""Which arguments and weights a model writes to, directly or through a view, by its trace.

A graph that ran on copies of its inputs must copy back what was written; a dummy batch must restore
what it wrote. A custom op's schema names its writes. Torch counts those of its own functions to
each fake tensor, but for those that hide some, as a batch norm in training does: they are run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...torch_compat.basics.ops import HigherOrderOperator, hides_writes, overload_of, triton_writes
from ...torch_compat.basics.tensors import (
    FakeTensorMode,
    is_wrapper_subclass,
    storage_id,
    writes_counted,
)
from ..ir.ops import FakeWrites, op_names, tensors_in, written_by
from .dynamo import Trace


def written_placeholders(trace: Trace) -> set[Node]:
    """The placeholders of arguments and weights whose memory some node writes to."""
    groups: dict[int, list[Node]] = {}
    for node in trace.tensors:
        if dense_tensors(fake := node.meta["example_value"]):
            groups.setdefault(storage_id(fake), []).append(node)
    written = written_storages(trace.graph.graph, groups.keys())
    return {node for storage in written for node in groups[storage]}


def written_storages(graph: Graph, storages: Collection[int]) -> set[int]:
    """Those of `storages` that some node writes to.

    A count may be that of making a fake, as for views and storages with several tensors: what is
    given memory with a count is run again.
    """
    counted, written = set[int](), set[int]()
    for node in graph.nodes:
        for tensor in dense_tensors(node.meta.get("example_value")):
            if writes_counted(tensor) and storage_id(tensor) in storages:
                counted.add(storage_id(tensor))
    for node in graph.nodes:
        uncounted = _is_uncounted(node)
        if not (counted or uncounted):
            continue
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda used: used.meta.get("example_value")
        )
        given = {storage_id(tensor) for tensor in dense_tensors((args, kwargs))}
        given.intersection_update(storages)
        if given & counted or (given and uncounted):
            try:
                written |= {storage_id(tensor) for tensor in _written(node, args, kwargs)}
            except Exception:  # a function that needs more than a node tells
                written |= given
    return written.intersection(storages)


def _is_uncounted(node: Node) -> bool:
    """Whether it may write what torch does not count."""
    is_op = op_names(node) or isinstance(node.target, HigherOrderOperator)
    return bool(is_op) or hides_writes(getattr(node.target, "__name__", ""))


def _written(node: Node, args: Any, kwargs: Any) -> Iterable[Tensor]:
    """By an op's schema, a Triton kernel's code, or a run; for any other op of higher order all."""
    if op_names(node):
        return written_by(overload_of(node), args, kwargs)
    if not isinstance(node.target, HigherOrderOperator):
        tensors, call = dense_tensors((args, kwargs)), node.target
        if isinstance(call, str):
            call, args = getattr(args[0], call), args[1:]
        fakes: FakeTensorMode = tensors[0].fake_mode  # type: ignore[attr-defined]
        with torch.no_grad(), fakes, FakeWrites(fakes) as writes:
            call(*args, **kwargs)
        return [tensor for tensor in tensors if writes.include(tensor)]
    known = triton_writes(node, kwargs)
    return dense_tensors((args, kwargs) if known is None else known)


def dense_tensors(value: Any) -> list[Tensor]:
    """The tensors in `value` that have a storage to share."""
    return [
        tensor
        for tensor in tensors_in(value)
        if tensor.layout is torch.strided and not is_wrapper_subclass(tensor)
    ]
