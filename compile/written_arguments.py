"""Which arguments a model writes to, directly or through a view, as its trace shows.

Where a step runs on copies of its inputs, what was written must get back to the caller. Torch
counts the writes to each fake tensor of a trace; what a custom op writes to, its schema tells.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

from ..torch_compat import (
    fresh_fake_mode,
    storage_id,
    tree_map_only,
    triton_writes,
)
from .examples import Leaf
from .split import op_names, overload_of
from .trace import Trace
from .writes import tensors_in, written_by


def written_arguments(trace: Trace) -> set[Node]:
    """The placeholders of arguments whose memory some node writes to."""
    fakes = fresh_fake_mode()
    arguments = {
        node: storage_id(node.meta["example_value"])
        for node, source in trace.sources.items()
        if isinstance(source, Leaf)
    }
    # a fake tensor of a view counts a write before the model runs
    untouched = {
        storage: fakes.from_tensor(source.value)._version
        for node, storage in arguments.items()
        if isinstance(source := trace.sources[node], Leaf)
    }
    written: set[int] = set()
    for node in trace.graph.graph.nodes:
        written |= {
            storage
            for tensor in tensors_in(node.meta.get("example_value"))
            if tensor._version > untouched.get(storage := storage_id(tensor), 0)
        }
        written |= {storage_id(tensor) for tensor in _written_by_schema(node)}
    return {node for node, storage in arguments.items() if storage in written}


def _written_by_schema(node: Node) -> Iterable[Tensor]:
    """Of a Triton kernel what its code writes; of an operator of higher order, all it is given."""
    args, kwargs = tree_map_only(
        Node, lambda used: used.meta.get("example_value"), (node.args, node.kwargs)
    )
    if op_names(node):
        return written_by(overload_of(node), args, kwargs)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        known = triton_writes(node, kwargs)
        return tensors_in((args, kwargs) if known is None else known)
    return ()
