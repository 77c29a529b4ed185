"""Symbols of a trace: sizes of its arguments, the names they were declared by, concrete values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...torch_compat.basics.symbolic import Symbolic, expression_of, is_of_integers, original_symbol
from ..ir.plan import NUMBER
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
    """The dynamic sizes of all arguments: argument, dimension, size. An argument that is a number
    is the size itself, of dimension NUMBER."""
    return [
        (source, dim, size)
        for node, source in trace.sources.items()
        if isinstance(source, Leaf)
        for dim, size in dims_of(node.meta["example_value"])
        if isinstance(size, torch.SymInt)
    ]


def dims_of(value: Any) -> list[tuple[int, Any]]:
    """The sizes of a tensor with their dimensions, or the number that an argument is."""
    return [*enumerate(value.shape)] if isinstance(value, torch.Tensor) else [(NUMBER, value)]


def sizes_of(trace: Trace) -> set[Node]:
    """The nodes whose value is a number, a truth value or a torch.Size that follows from the sizes
    of arguments.

    A size that depends on data, such as the length of `nonzero()`, is passed like a tensor. It is
    judged by what it is computed from, not by its value in the trace: that `nonzero()` has 4 rows
    holds only while the assertion holds that says so.
    """
    symbols = symbol_labels(trace).keys()
    follow: set[Node] = set()
    for node in filter(is_number, trace.graph.graph.nodes):
        value = node.meta["example_value"]
        parts = value if isinstance(value, torch.Size) else [value]
        originals = [original_symbol(part) for part in parts if isinstance(part, Symbolic)]
        known = all(original.free_symbols <= symbols for original in originals)
        if known and all(used in follow for used in node.all_input_nodes if is_number(used)):
            follow.add(node)
    return follow


def is_number(node: Node) -> bool:
    """Whether the value of a node is a number, a truth value or a torch.Size."""
    value = node.meta.get("example_value")
    return isinstance(value, int | float | torch.Size | Symbolic)


def follows_calls(node: Node, sizes: Collection[Node]) -> bool:
    """Whether a number of `sizes` is computed by the calls of the model, not from its expression:
    sympy reorders the terms of an expression with floats, which changes the rounding."""
    value, inputs = node.meta["example_value"], node.all_input_nodes
    is_computed = bool(inputs) and all(used in sizes for used in inputs)
    return is_computed and isinstance(value, Symbolic) and not is_of_integers(value)


def size_at(size: Any, sizes: Sizes) -> int | None:
    """A size of the trace as a number; None for one that depends on data or divides by zero."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    try:
        expression = expression_of(size).subs(sizes)
    except ZeroDivisionError:
        return None
    return None if expression.free_symbols else int(expression)


def input_at(node: Node, sizes: Sizes) -> Any:
    """A value in the form of a placeholder's: a number, or an uninitialized tensor; None for one
    whose size depends on data."""
    value = node.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        return size_at(value, sizes)
    shape: Any = [size_at(size, sizes) for size in value.shape]
    stride: Any = [size_at(step, sizes) for step in value.stride()]
    if None in (*shape, *stride):
        return None
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
