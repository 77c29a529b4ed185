"""Compilers by name: how a unique piece becomes a callable, and whether it can be stored.

`inductor` produces artifacts. `eager` and torch's registered backends produce callables that cannot
leave the process, so a model compiled by them is traced at each start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch
from torch.fx import GraphModule

from ...errors import UnknownCompiler
from ...events import Events
from ...torch_compat.dynamo import registered_backend, registered_backends
from ..ir.compilation import Blobs, Finish, PieceFn
from . import inductor

ENTRY_POINTS = "piecegraph.compilers"

CompilePiece = Callable[[GraphModule, list[Any], Mapping[str, Any]], Finish]


@dataclass(frozen=True)
class Compiler:
    """`compile(graph, inputs, options)` starts; the function it returns finishes.

    Finishing gives a callable and blobs, which are empty if nothing can be stored. The next piece
    may be started before one is finished. `load` rebuilds the callables of several artifacts at
    once; None for a compiler without artifacts.
    """

    name: str
    compile: CompilePiece
    load: Callable[[Sequence[Blobs]], list[PieceFn]] | None = None
    first_use: Callable[[torch.device, Events], None] | None = None
    """Does work that is needed once per machine, so that it is not timed as part of a piece."""
    session: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context that is open while the pieces of one model are compiled."""


INDUCTOR = Compiler(
    "inductor",
    inductor.compile_piece,
    inductor.load_pieces,
    inductor.first_use,
    inductor.compiling,
)


def compiler_named(name: str) -> Compiler:
    """The compiler called `name`: one of ours, an entry point, or a registered torch backend.

    An entry point of the group `piecegraph.compilers` refers to a `Compiler`. Raises
    UnknownCompiler.
    """
    if name == "inductor":
        return INDUCTOR
    if name == "eager":
        return Compiler(name, _compile_eagerly)
    registered = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in registered:
        loaded: Compiler = registered[name].load()
        return loaded
    backends = registered_backends()
    if name not in backends:
        known = sorted({"inductor", "eager", *registered, *backends})
        raise UnknownCompiler(name=name, known=", ".join(known))
    return Compiler(name, _with_backend(name))


def _compile_eagerly(graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]) -> Finish:
    forward = graph.forward
    return lambda: (lambda args: forward(*args), {})


def _with_backend(name: str) -> CompilePiece:
    def compile_piece(graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]) -> Finish:
        compiled = registered_backend(name)(graph, inputs)
        return lambda: (lambda args: compiled(*args), {})

    return compile_piece
