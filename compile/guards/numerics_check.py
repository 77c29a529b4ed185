"""Compare a compiled piece with its graph by running both on generated inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..ir.compilation import PieceFn
from ..ir.ops import ALLOCATIONS
from ..trace.symbols import Sizes, input_at

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Absolute and relative tolerance by dtype; results of other dtypes must be equal."""


def numeric_difference(fn: PieceFn, graph: GraphModule, sizes: Sizes) -> str | None:
    """How the results of `fn` differ from those of `graph` at `sizes`; None if they are equal.

    Floating-point inputs are small random numbers. All others are zero, since an index of zero is
    in range for any table. Uninitialized results are not compared.
    """
    results: Any = graph.graph.output_node().args[0]
    inputs = concrete_inputs(graph, sizes)
    with torch.no_grad():
        expected = graph(*_clones(inputs))
        got = fn(_clones(inputs))
    for index, (node, one, other) in enumerate(zip(results, got, expected, strict=True)):
        if isinstance(node, Node) and node.target in ALLOCATIONS:
            continue
        if found := _difference(one, other):
            return f"result {index} {found}"
    return None


def concrete_inputs(graph: GraphModule, sizes: Sizes) -> list[Any]:
    """Generated inputs with the shapes and dtypes of the graph's inputs at `sizes`."""
    return [_generated(node, sizes) for node in graph.graph.find_nodes(op="placeholder")]


def _difference(got: Any, expected: Any) -> str | None:
    if not isinstance(expected, torch.Tensor):
        return None if got == expected else f"is {got} instead of {expected}"
    if got.shape != expected.shape or got.dtype is not expected.dtype:
        return f"is {tuple(got.shape)} instead of {tuple(expected.shape)}"
    if expected.is_meta:  # it has no values to compare
        return None
    tolerance = TOLERANCE.get(expected.dtype, 0.0)
    if torch.allclose(got, expected, tolerance, tolerance, equal_nan=True):
        return None
    return f"is off by {(got.double() - expected.double()).abs().max().item():.3g}"


def _clones(inputs: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]


def _generated(node: Node, sizes: Sizes) -> Any:
    value = input_at(node, sizes)
    if not isinstance(value, torch.Tensor):
        return value
    return value.normal_(std=0.1) if value.dtype.is_floating_point else value.zero_()
