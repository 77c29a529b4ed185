"""AOTInductor libraries: a unique piece as one shared object, loaded without Dynamo or Inductor.

A library takes tensors only: a size is passed as the length of an empty tensor. A library is stored
only if its results agree with those of the piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...errors import LibraryUnusable
from ...torch_compat.basics.symbolic import expression_of, traced_size, with_numbers
from ...torch_compat.basics.tensors import fresh_fake_mode
from ...torch_compat.compiling.aoti import aoti_compile
from ..guards.numerics_check import numeric_difference
from ..guards.prover import Ranges, prove
from ..guards.range_check import corners
from ..pieces.piece import size_positions
from .inductor import load_library


def build_library(
    graph: GraphModule, limits: Ranges, device: torch.device, options: Mapping[str, Any]
) -> bytes:
    """The library of a piece's graph; call it inside `compiling()`.

    Raises LibraryUnusable if the library would not hold for every size in `limits` or its results
    differ from the graph's, and torch's errors where the piece cannot be exported.
    """
    carried = _sizes_as_tensors(graph)
    inputs, dynamic = _example_tensors(carried, limits)
    compiled = aoti_compile(carried, inputs, dynamic, dict(options))
    for guard in compiled.guards:
        if not prove(guard, compiled.ranges).holds:
            raise LibraryUnusable(reason=f"it is valid only if {guard}")
    library = load_library(compiled.library, size_positions(graph.graph), device)
    for sizes in corners(limits):
        if fault := numeric_difference(library, graph, sizes):
            raise LibraryUnusable(reason=f"at {dict(sizes)} {fault}")
    return compiled.library.read_bytes()


def _sizes_as_tensors(graph: GraphModule) -> GraphModule:
    """A copy that takes each size input as the length of an empty tensor."""
    copy = Graph()
    values: dict[Node, Node] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        values[node] = copy.node_copy(node)
    for node, carrier in list(values.items()):
        if isinstance(node.meta["example_value"], torch.SymInt):
            values[node] = copy.call_function(torch.ops.aten.sym_size.int, (carrier, 0))
    copy.output(copy.graph_copy(graph.graph, values))
    return GraphModule(graph, copy)


def _example_tensors(
    graph: GraphModule, limits: Ranges
) -> tuple[list[torch.Tensor], list[dict[int, tuple[str, int, int] | None]]]:
    """Fake tensors with the traced sizes, and the range of each dynamic dimension."""
    one_size = {symbol: low for symbol, (low, high) in limits.items() if low == high}

    def constant(size: int | torch.SymInt) -> int | None:
        """A size that is the same in all of `limits`, as in code of one compile size."""
        known = with_numbers(size, one_size)
        return known if isinstance(known, int) else None

    def example(size: int | torch.SymInt) -> int:
        known = constant(size)
        return traced_size(size) if known is None else known

    tensors, dynamic = [], []
    with fresh_fake_mode():
        for shape, stride, dtype, device in map(_form, graph.graph.find_nodes(op="placeholder")):
            sizes, strides = [*map(example, shape)], [*map(example, stride)]
            tensors.append(torch.empty_strided(sizes, strides, dtype=dtype, device=device))
            dynamic.append(
                {i: _range(size, limits) for i, size in enumerate(shape) if constant(size) is None}
            )
    return tensors, dynamic


def _form(node: Node) -> tuple[Any, Any, torch.dtype, torch.device]:
    value = node.meta["example_value"]
    if isinstance(value, torch.SymInt):
        return (value, 0), (1, 1), torch.float32, torch.device("cpu")
    return value.shape, value.stride(), value.dtype, value.device


def _range(size: torch.SymInt, limits: Ranges) -> tuple[str, int, int] | None:
    expression = expression_of(size)
    return (str(expression), *limits[expression]) if expression.is_Symbol else None
