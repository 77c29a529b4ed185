"""Inductor artifacts: a unique piece compiled, kept with its kernels, loaded without a compiler.

On a CPU Inductor's serialised artifact holds C++ source, and loading it runs the C++ compiler
unless the shared libraries are found in Inductor's cache directory. An artifact of ours therefore
carries those libraries, and loading lays them out in a private directory first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from ..torch_compat import (
    compiler_dispensable,
    compiler_version,
    inductor_cache_directory,
    inductor_callable,
    inductor_compile,
    inductor_deserialize,
    inductor_options,
    inductor_serialize,
)
from .artifact import CODE, COMPILER, KERNEL, Blobs, PieceFn


def compile_piece(
    graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]
) -> tuple[PieceFn, Blobs]:
    """Compile `graph` for its symbolic `inputs`; the callable, and the artifact as named blobs."""
    with _scratch() as folder:
        with inductor_cache_directory(folder), inductor_options():
            artifact = inductor_compile(graph, inputs, dict(options))
            blobs = {CODE: inductor_serialize(artifact), **_kernels(Path(folder))}
            if any(name.startswith(KERNEL) for name in blobs):
                blobs[COMPILER] = compiler_version()
            return inductor_callable(artifact), blobs


def compile_uncached(
    graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]
) -> tuple[PieceFn, Blobs]:
    """As `compile_piece` with every cache of torch's off, local and remote; nothing is kept."""
    uncached = {**options, "force_disable_caches": True}
    with _scratch() as folder:
        with inductor_cache_directory(folder), inductor_options():
            return inductor_callable(inductor_compile(graph, inputs, uncached)), {}


def load_pieces(artifacts: Sequence[Blobs]) -> list[PieceFn]:
    """The callables of artifacts whose bytes have been verified; no compiler is run."""
    with _scratch() as folder:
        for blobs in artifacts:
            _lay_out(blobs, Path(folder))
        version = next((blobs[COMPILER] for blobs in artifacts if COMPILER in blobs), b"")
        absent = compiler_dispensable(folder, version)
        with inductor_cache_directory(folder), inductor_options(), absent:
            return [inductor_callable(inductor_deserialize(blobs[CODE])) for blobs in artifacts]


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory for one compile or load; Inductor's threads may still write to it at the end."""
    return tempfile.TemporaryDirectory(prefix="piecegraph-", ignore_cleanup_errors=True)


def _kernels(folder: Path) -> dict[str, bytes]:
    """Inductor keeps each library at <two letters>/<name>; a blob's name holds both."""
    return {
        f"{KERNEL}{file.parent.name}.{file.name}": file.read_bytes()
        for file in sorted(folder.rglob("*.so"))
    }


def _lay_out(blobs: Blobs, folder: Path) -> None:
    for name, content in blobs.items():
        if name.startswith(KERNEL):
            parent, _, file = name.removeprefix(KERNEL).partition(".")
            (folder / parent).mkdir(exist_ok=True)
            (folder / parent / file).write_bytes(content)
