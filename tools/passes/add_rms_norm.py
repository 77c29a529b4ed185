"""Fuse the addition of a residual and the RMSNorm of the sum into one operator."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from . import ops  # noqa: F401  (registers the operator)
from .matching import Either, Found, Op, match

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default

_WIDE = Either((Op(_CONVERT, ("total", torch.float32)), "total"))
_SQUARES = Either((Op(aten.pow.Tensor_Scalar, (_WIDE, 2)), Op(aten.mul.Tensor, (_WIDE, _WIDE))))
_MEAN = Op(aten.mean.dim, (_SQUARES, [-1], True))
_SCALE = Op(aten.rsqrt.default, (Op(aten.add.Tensor, (_MEAN, "eps")),))
_NORMED = Op(aten.mul.Tensor, (_WIDE, _SCALE), swap=True)
_PATTERN = Op(
    aten.mul.Tensor, (Either((Op(_CONVERT, (_NORMED, "dtype")), _NORMED)), "weight"), swap=True
)


def apply(graph: Graph) -> int:
    """Rewrite each occurrence; returns their number."""
    rewrites = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.mul.Tensor)):
        found = match(_PATTERN, node)
        if found and _fits(found):
            _rewrite(graph, node, found)
            rewrites += 1
    return rewrites


def _fits(found: Found) -> bool:
    """Whether the operator computes the same: a plain sum, one dtype, a 1-d weight."""
    total, weight = found["total"], found["weight"]
    if not (isinstance(total, Node) and isinstance(weight, Node)):
        return False
    if total.target is not aten.add.Tensor or total.kwargs or weight.op != "placeholder":
        return False
    if not all(isinstance(term, Node) for term in total.args):
        return False
    values = [node.meta["val"] for node in (total, weight, *total.all_input_nodes)]
    return (
        len({value.dtype for value in values}) == 1
        and values[1].dim() == 1
        and found.get("dtype", values[0].dtype) == values[0].dtype
        and isinstance(found["eps"], float)
    )


def _rewrite(graph: Graph, node: Node, found: Found) -> None:
    total: Node = found["total"]
    args: tuple[Any, ...] = (*total.args, found["weight"], found["eps"])
    with graph.inserting_before(total):
        fused = graph.call_function(torch.ops.piecegraph.add_rms_norm.default, args)
        normed = graph.call_function(operator.getitem, (fused, 0))
        summed = graph.call_function(operator.getitem, (fused, 1))
    normed.meta.update(node.meta)
    summed.meta.update(total.meta)
    fused.meta["val"] = (node.meta["val"], total.meta["val"])
    node.replace_all_uses_with(normed)
    total.replace_all_uses_with(summed)
