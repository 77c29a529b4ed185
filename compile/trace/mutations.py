"""Which arguments and weights a model writes to, directly or through a view, by its trace.

A graph that ran on copies of its inputs must copy back what was written; a dummy batch must restore
what it wrote. Torch counts the writes to each fake tensor; a custom op's schema names its own, and
a function that hides some, as a batch norm in training does, is run on fakes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...torch_compat.basics.ops import HigherOrderOperator, hides_writes, overload_of, triton_writes
from ...torch_compat.basics.tensors import (
    faked_again,
    fresh_fake_mode,
    is_wrapper_subclass,
    storage_id,
    tree_map_only,
    whole,
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
    mode, untouched, of_tensors = fresh_fake_mode(), dict.fromkeys(groups, 0), dict[int, int]()
    for storage, nodes in groups.items():
        values = [node.meta["example_value"] for node in nodes]
        if any(map(writes_counted, values)):
            fakes = [faked_again(trace.tensors[node], mode) for node in nodes]  # alive together
            counts = [*map(writes_counted, fakes)]
            of_tensors |= {id(whole(v)): count for v, count in zip(values, counts, strict=True)}
            untouched[storage] = min(counts)
    written = written_storages(trace.graph.graph, untouched, of_tensors)
    return {node for storage in written for node in groups[storage]}


def written_storages(
    graph: Graph, untouched: Mapping[int, int], of_tensors: Mapping[int, int] = MappingProxyType({})
) -> set[int]:
    """Those that some node writes to of storages, given with their counts of writes before.

    Tensors that share a storage each have a count: `of_tensors` has those that differ, by id.
    """
    written: set[int] = set()
    for node in graph.nodes:
        written |= {
            storage
            for tensor in dense_tensors(node.meta.get("example_value"))
            if (storage := storage_id(tensor)) in untouched
            and writes_counted(tensor) > of_tensors.get(id(whole(tensor)), untouched[storage])
        }
        is_op = op_names(node) or isinstance(node.target, HigherOrderOperator)
        if not (is_op or hides_writes(getattr(node.target, "__name__", ""))):
            continue  # torch has counted its writes
        args, kwargs = tree_map_only(
            Node, lambda used: used.meta.get("example_value"), (node.args, node.kwargs)
        )
        if any(storage_id(tensor) in untouched for tensor in dense_tensors((args, kwargs))):
            written |= {storage_id(tensor) for tensor in _written(node, args, kwargs)}
    return written & untouched.keys()


def _written(node: Node, args: Any, kwargs: Any) -> Iterable[Tensor]:
    """By an op's schema or a Triton kernel's code; for any other op of higher order all tensors."""
    if op_names(node):
        return written_by(overload_of(node), args, kwargs)
    if not isinstance(node.target, HigherOrderOperator):
        tensors = dense_tensors((args, kwargs))
        with FakeWrites(tensors[0].fake_mode) as writes:  # type: ignore[attr-defined]
            node.target(*args, **kwargs)  # type: ignore[operator]
        return filter(writes.include, tensors)
    known = triton_writes(node, kwargs)
    return dense_tensors((args, kwargs) if known is None else known)


def dense_tensors(value: Any) -> list[Tensor]:
    """The tensors in `value` that have a storage to share."""
    return [
        tensor
        for tensor in tensors_in(value)
        if tensor.layout is torch.strided and not is_wrapper_subclass(tensor)
    ]
