"""Symbols of a trace: the sizes of its arguments and the names they were declared by."""

from __future__ import annotations

import sympy
import torch

from ...torch_compat.dynamo import original_symbol
from .dynamo import Trace
from .examples import Leaf


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
