"""Keep the addition of a residual stream apart from the matrix product before it, on a GPU.

Inductor makes `addmm(inp, a, b)` of `inp + mm(a, b)` unless only pointwise operators read the sum.
A piece also returns its residual stream, so there it does. CUDA's `addmm` copies an `inp` of two
dimensions to the result first, and the addition is not fused with the norm that follows.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


def apply(graph: Graph) -> int:
    """Replace each joined sum by a product and an addition; returns their number."""
    nodes = graph.find_nodes(op="call_function", target=aten.addmm.default)
    joined = [node for node in nodes if _is_joined_sum(node)]
    for node in joined:
        inp, *factors = node.args
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, tuple(factors))
            total = graph.call_function(aten.add.Tensor, (inp, product))
        product.meta["val"] = node.meta["val"]
        total.meta.update(node.meta)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    return len(joined)


def _is_joined_sum(node: Node) -> bool:
    """Whether `node` adds a tensor as large as the product, and the model did not write `addmm`."""
    inp, result = node.args[0], node.meta["val"]
    if node.kwargs or not isinstance(inp, Node) or result.device.type != "cuda":
        return False
    own = node.meta.get("original_aten") is aten.addmm.default
    return not own and [*map(str, inp.meta["val"].shape)] == [*map(str, result.shape)]
