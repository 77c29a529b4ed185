"""AOTInductor libraries: a unique piece as one shared object, loaded without Dynamo or Inductor.

A library takes tensors only: a size is passed as the length of an empty tensor. A library is stored
only if its results agree with those of the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...errors import LibraryUnusable
from ...torch_compat.basics.symbolic import expression_of, traced_size
from ...torch_compat.basics.tensors import fresh_fake_mode
from ...torch_compat.compiling.aoti import AheadCompiled, aoti_compile
from ...torch_compat.compiling.aoti_build import LibraryBuilds, library_builds
from ...torch_compat.compiling.inductor import cache_directory
from ..guards.numerics_check import numeric_difference
from ..guards.prover import Ranges, prove
from ..guards.range_check import corners
from ..pieces.piece import size_positions
from .inductor import compiling, load_library, toolchain_directory


@contextmanager
def building() -> Iterator[LibraryBuilds]:
    """Threads in which the C++ compilers of several libraries run, and a directory for them."""
    with compiling(), library_builds(toolchain_directory(cache_directory())) as builds:
        yield builds


def begin_library(
    graph: GraphModule,
    limits: Ranges,
    device: torch.device,
    options: Mapping[str, Any],
    builds: LibraryBuilds,
) -> Callable[[], bytes]:
    """Generate the library of a piece's graph; the function returned waits for it and checks it.

    Raises LibraryUnusable if the library would not hold for every size in `limits`, and torch's
    errors where the piece cannot be exported; the function raises LibraryUnusable if its results
    differ from the graph's. Call both inside `building()`.
    """
    carried = _sizes_as_tensors(graph)
    inputs, dynamic = _example_tensors(carried, limits)
    compiled = aoti_compile(carried, inputs, dynamic, dict(options), builds)
    _check_general(compiled)

    def finish() -> bytes:
        path = compiled.library.result()
        library = load_library(path, size_positions(graph.graph), device)
        for sizes in corners(limits):
            if fault := numeric_difference(library, graph, sizes):
                raise LibraryUnusable(reason=f"at {dict(sizes)} {fault}")
        return path.read_bytes()

    return finish


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
    tensors, dynamic = [], []
    with fresh_fake_mode():
        for shape, stride, dtype, device in map(_form, graph.graph.find_nodes(op="placeholder")):
            sizes = [traced_size(size) for size in shape]
            strides = [traced_size(step) for step in stride]
            tensors.append(torch.empty_strided(sizes, strides, dtype=dtype, device=device))
            dynamic.append(
                {i: _range(size, limits) for i, size in enumerate(shape) if not _is_fixed(size)}
            )
    return tensors, dynamic


def _form(node: Node) -> tuple[Any, Any, torch.dtype, torch.device]:
    value = node.meta["example_value"]
    if isinstance(value, torch.SymInt):
        return (value, 0), (1, 1), torch.float32, torch.device("cpu")
    return value.shape, value.stride(), value.dtype, value.device


def _is_fixed(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) or bool(expression_of(size).is_Integer)


def _range(size: torch.SymInt, limits: Ranges) -> tuple[str, int, int] | None:
    expression = expression_of(size)
    return (str(expression), *limits[expression]) if expression.is_Symbol else None


def _check_general(compiled: AheadCompiled) -> None:
    for guard in compiled.guards:
        if not prove(guard, compiled.ranges).holds:
            raise LibraryUnusable(reason=f"it is valid only if {guard}")
