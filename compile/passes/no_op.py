"""Remove operators that return their input unchanged.

Views to the same shape, full slices and conversions to the same dtype change nothing, but they hide
the operators that patterns look for.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

_SAME_SHAPE = (aten.view.default, aten.reshape.default, aten.expand.default)
_SAME_DTYPE = (torch.ops.prims.convert_element_type.default,)


def apply(graph: Graph) -> int:
    """Replace each no-op by its input; returns their number."""
    useless = [node for node in graph.nodes if _does_nothing(node)]
    for node in useless:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return len(useless)


def _does_nothing(node: Node) -> bool:
    if node.target in _SAME_SHAPE:
        return _shape(node) == _shape(node.args[0])
    if node.target in _SAME_DTYPE:
        return bool(node.meta["val"].dtype == node.args[0].meta["val"].dtype)  # type: ignore[union-attr]
    return node.target is aten.slice.Tensor and _takes_all(node.args)


def _takes_all(args: tuple[Any, ...]) -> bool:
    """Whether the slice arguments (tensor, dim, start, stop, step) select everything."""
    start, stop, step = (*args[2:], None, None, None)[:3]
    return not start and stop in (None, sys.maxsize) and step in (None, 1)


def _shape(node: object) -> list[str]:
    """Sizes as text: symbolic sizes are equal if their expressions are."""
    assert isinstance(node, Node)
    return [str(size) for size in node.meta["val"].shape]
