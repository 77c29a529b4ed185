"""Compilers by name: how a unique piece becomes a callable, and whether it can be stored.

`inductor` produces artifacts. `eager` and torch's registered backends produce callables that cannot
leave the process, so a model compiled by them is traced at each start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from ...cache import Cache
from ...errors import UnknownCompiler
from ...events import Events
from ...torch_compat.tracing.dynamo import registered_backend, registered_backends
from ..ir.compilation import Building, CompilePiece, Compiler
from ..ir.config import CodeConfig
from ..ir.registered_compilers import BUILT_IN, registered_compiler, registered_names
from . import inductor
from .editable_code import editable_inductor

INDUCTOR = Compiler(
    "inductor",
    inductor.compile_piece,
    inductor.load_pieces,
    inductor.first_use,
    inductor.compiling,
    before_load=inductor.before_load,
    in_workers=True,
)


def compiler_for(code: CodeConfig, dump_dir: Path | None, cache: Cache, events: Events) -> Compiler:
    """The compiler that the settings name, in the form that dumping and the cache need.

    Raises UnknownCompiler.
    """
    if code.compiler != "inductor":
        return compiler_named(code.compiler)
    if dump_dir is not None:
        return editable_inductor(dump_dir, events)
    if not cache.enabled:
        return Compiler("inductor", inductor.compile_uncached, session=inductor.compiling)
    return INDUCTOR


def compiler_named(name: str) -> Compiler:
    """The compiler called `name`: one of ours, an entry point, or a registered torch backend.

    An entry point of the group `piecegraph.compilers` refers to a `Compiler`. Raises
    UnknownCompiler and CompilerUnversioned.
    """
    if name == "inductor":
        return INDUCTOR
    if name == "eager":
        return Compiler(name, _compile_eagerly)
    if (compiler := registered_compiler(name)) is not None:
        return compiler
    backends = registered_backends()
    if name not in backends:
        known = sorted({*BUILT_IN, *registered_names(), *backends})
        raise UnknownCompiler(name=name, known=", ".join(known))
    return Compiler(name, _with_backend(name))


def _compile_eagerly(graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]) -> Building:
    forward = graph.forward
    return lambda: (lambda args: forward(*args), {})


def _with_backend(name: str) -> CompilePiece:
    def compile_piece(
        graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]
    ) -> Building:
        compiled = registered_backend(name)(graph, inputs)
        return lambda: (lambda args: compiled(*args), {})

    return compile_piece
