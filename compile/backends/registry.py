"""Compilers by name: how a unique piece becomes a callable, and whether it can be stored.

`inductor` produces artifacts. `eager` and torch's registered backends produce callables that cannot
leave the process, so a model compiled by them is traced at each start.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from ...errors import UnknownCompiler
from ...events import Events
from ...torch_compat.compiling.inductor import (
    inductor_cache_directory,
    inductor_compile_to,
    inductor_load_from,
    inductor_options,
)
from ...torch_compat.tracing.dynamo import registered_backend, registered_backends
from ..ir.compilation import Building, CompilePiece, Compiler, CompileRequest
from ..ir.locations import graph_source
from ..ir.registered_compilers import BUILT_IN, registered_compiler, registered_names
from . import inductor
from .inductor import scratch, toolchain_directory

INDUCTOR = Compiler(
    "inductor",
    inductor.compile_piece,
    inductor.load_pieces,
    inductor.first_use,
    inductor.compiling,
    before_load=inductor.before_load,
    in_workers=True,
)


def compiler_for(request: CompileRequest) -> Compiler:
    """The compiler that the settings name, in the form that dumping and the cache need.

    Raises UnknownCompiler.
    """
    if request.config.code.compiler != "inductor":
        return compiler_named(request.config.code.compiler)
    if request.dump_dir is not None:
        return editable_inductor(request.dump_dir, request.events)
    if not request.cache.enabled:
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


DIGESTS = "digests.json"
"""File next to the code with the sha256 of each generated file."""


def editable_inductor(dump_dir: Path, events: Events) -> Compiler:
    """Inductor with code in directories `inductor_<hash>` of `dump_dir`; stores no artifacts.

    The code that runs is always loaded from there. A directory that exists is used as it is: an
    edit of its Python or C++ source takes effect at the next start, which logs that the code was
    changed. Delete the directory to compile the piece again.
    """

    def compile_piece(
        graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]
    ) -> Building:
        stated = {name: _stated(option) for name, option in sorted(options.items())}
        content = f"{graph_source(graph)} {stated}"
        folder = dump_dir / f"inductor_{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        with scratch() as temporary, inductor_options(toolchain_directory(temporary)):
            if not folder.exists():
                with inductor_cache_directory(temporary):
                    inductor_compile_to(graph, inputs, dict(options), str(folder))
                (folder / "graph.py").write_text(graph_source(graph))
                (folder / DIGESTS).write_text(json.dumps(_digests(folder)))
            _report_edits(folder, events)
            loaded = inductor_load_from(str(folder))
        return lambda: (loaded, {})

    return Compiler("inductor", compile_piece)


def _stated(option: Any) -> Any:
    """An option as text that is equal in every process; a pass is stated by its key."""
    return option.uuid() if hasattr(option, "uuid") else option


def _report_edits(folder: Path, events: Events) -> None:
    """Report edits of generated files; torch adds other files when it loads the code."""
    stated = json.loads((folder / DIGESTS).read_text()) if (folder / DIGESTS).exists() else {}
    if not stated or not stated.items() <= _digests(folder).items():
        events.count("compile.tampered")
        events.emit("compile.tampered", level=logging.WARNING, directory=folder.name)


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".py", ".cpp", ".h")
    }
