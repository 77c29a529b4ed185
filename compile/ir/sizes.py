"""Values of a traced graph at concrete sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

Sizes = Mapping[sympy.Symbol, int]


def size_at(size: Any, sizes: Sizes) -> int | None:
    """A size of the trace as a number; None for one that depends on data."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.shape_env.replace(size.node.expr).subs(sizes)
    return None if expression.free_symbols else int(expression)


def input_at(node: Node, sizes: Sizes) -> Any:
    """A value of the form that a placeholder has: a number, or a tensor that is not filled."""
    value = node.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        return size_at(value, sizes)
    shape: Any = [size_at(size, sizes) for size in value.shape]
    stride: Any = [size_at(step, sizes) for step in value.stride()]
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
