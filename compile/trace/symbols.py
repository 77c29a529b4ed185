"""Symbols of a trace: sizes of its arguments, the names they were declared by, concrete values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...torch_compat.basics.symbolic import expression_of, original_symbol
from .dynamo import Trace
from .examples import Leaf

Sizes = Mapping[sympy.Symbol, int]


def symbol_labels(trace: Trace) -> dict[sympy.Symbol, str]:
    """The declared name of every symbol of an argument, equal ones included."""
    labels: dict[sympy.Symbol, str] = {}
    for leaf, dim, size in argument_sizes(trace):
        label = trace.examples.symbols.get((leaf.label, dim))
        if label:
            for symbol in (original_symbol(size), trace.symbol_of(size)):
                labels.setdefault(symbol, label)
    return labels


def argument_sizes(trace: Trace) -> list[tuple[Leaf, int, torch.SymInt]]:
    """The dynamic sizes of all arguments: argument, dimension, size."""
    return [
        (source, dim, size)
        for node, source in trace.sources.items()
        if isinstance(source, Leaf)
        for dim, size in enumerate(node.meta["example_value"].shape)
        if isinstance(size, torch.SymInt)
    ]


def size_at(size: Any, sizes: Sizes) -> int | None:
    """A size of the trace as a number; None for one that depends on data."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = expression_of(size).subs(sizes)
    return None if expression.free_symbols else int(expression)


def input_at(node: Node, sizes: Sizes) -> Any:
    """A value in the form of a placeholder's: a number, or an uninitialized tensor."""
    value = node.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        return size_at(value, sizes)
    shape: Any = [size_at(size, sizes) for size in value.shape]
    stride: Any = [size_at(step, sizes) for step in value.stride()]
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
