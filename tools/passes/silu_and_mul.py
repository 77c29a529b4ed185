"""Fuse the SwiGLU activation, `silu(gate) * up`, into one operator."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from . import ops  # noqa: F401  (registers the operator)
from .matching import Either, Found, Op, match

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default


def _silu(x: object) -> Either:
    """In Inductor's decomposition, or written by hand."""
    exp_of_minus = Op(aten.exp.default, (Op(aten.neg.default, (x,)),))
    quotient = Op(aten.div.Tensor, (x, Op(aten.add.Tensor, (exp_of_minus, 1))))
    product = Op(aten.mul.Tensor, (x, Op(aten.sigmoid.default, (x,))), swap=True)
    return Either((quotient, product))


_WIDENED = Op(_CONVERT, (_silu(Op(_CONVERT, ("gate", torch.float32))), "dtype"))
_PATTERN = Op(aten.mul.Tensor, (Either((_WIDENED, _silu("gate"))), "up"), swap=True)


def apply(graph: Graph) -> int:
    """Rewrite each occurrence; returns their number."""
    rewrites = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.mul.Tensor)):
        found = match(_PATTERN, node)
        if found and _fits(found):
            with graph.inserting_before(node):
                fused = graph.call_function(
                    torch.ops.piecegraph.silu_and_mul.default, (found["gate"], found["up"])
                )
            fused.meta.update(node.meta)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            rewrites += 1
    return rewrites


def _fits(found: Found) -> bool:
    """Whether the operator computes the same: equal shapes, and one dtype throughout."""
    gate, up = found["gate"], found["up"]
    if not (isinstance(gate, Node) and isinstance(up, Node)):
        return False
    one, other = gate.meta["val"], up.meta["val"]
    same_shape = list(map(str, one.shape)) == list(map(str, other.shape))
    return same_shape and {other.dtype, found.get("dtype", one.dtype)} == {one.dtype}
