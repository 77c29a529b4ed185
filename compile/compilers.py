"""Compilers by name: what turns a unique piece into a callable, and what can be kept of it.

`inductor` yields artifacts. `eager` and torch's registered backends yield callables of this process
only, so a model compiled by them is traced anew at each start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from torch.fx import GraphModule

from ..errors import UnknownCompiler
from . import inductor
from .inductor import Blobs, PieceFn

ENTRY_POINTS = "piecegraph.compilers"


@dataclass(frozen=True)
class Compiler:
    """`compile(graph, inputs, options)` gives the callable and its blobs; none if not kept.

    `load` rebuilds the callables of several artifacts at once; None for a compiler that keeps none.
    """

    name: str
    compile: Callable[[GraphModule, list[Any], Mapping[str, Any]], tuple[PieceFn, Blobs]]
    load: Callable[[list[Blobs]], list[PieceFn]] | None = None


def compiler_named(name: str) -> Compiler:
    """The compiler called `name`: one of ours, an entry point, or a registered torch backend.

    An entry point of group `piecegraph.compilers` is an object like `Compiler`.
    Raises UnknownCompiler.
    """
    if name == "inductor":
        return Compiler(name, inductor.compile_piece, inductor.load_pieces)
    if name == "eager":
        return Compiler(name, _eager)
    for entry_point in entry_points(group=ENTRY_POINTS):
        if entry_point.name == name:
            loaded: Compiler = entry_point.load()
            return loaded
    from torch._dynamo.backends.registry import list_backends

    backends = list_backends(exclude_tags=())
    if name not in backends:
        known = ["inductor", "eager", *(e.name for e in entry_points(group=ENTRY_POINTS))]
        raise UnknownCompiler(name=name, known=", ".join(sorted({*known, *backends})))
    return Compiler(name, _backend(name))


def _eager(
    graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]
) -> tuple[PieceFn, Blobs]:
    forward = graph.forward
    return lambda args: forward(*args), {}


def _backend(
    name: str,
) -> Callable[[GraphModule, list[Any], Mapping[str, Any]], tuple[PieceFn, Blobs]]:
    def compile_with_backend(
        graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]
    ) -> tuple[PieceFn, Blobs]:
        from torch._dynamo.backends.registry import lookup_backend

        compiled = lookup_backend(name)(graph, inputs)
        return lambda args: compiled(*args), {}

    return compile_with_backend
