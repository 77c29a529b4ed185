"""Inductor artifacts: one unique piece compiled, kept with its kernels, and loaded without a compiler.

On a CPU Inductor's serialised artifact holds C++ source, and loading it runs the C++ compiler unless
the shared libraries are found in Inductor's cache directory. An artifact of ours therefore carries
those libraries, and loading lays them out in a private directory first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from ..torch_compat import (
    inductor_cache_directory,
    inductor_callable,
    inductor_compile,
    inductor_deserialize,
    inductor_options,
    inductor_serialize,
)

PieceFn = Callable[[list[Any]], Any]
Blobs = dict[str, bytes]

CODE = "inductor"
KERNELS = "kernels/"


def compile_piece(
    graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]
) -> tuple[PieceFn, Blobs]:
    """Compile `graph` for its symbolic `inputs`; the callable, and the artifact as named blobs."""
    with tempfile.TemporaryDirectory(prefix="piecegraph-") as folder:
        with inductor_cache_directory(folder), inductor_options():
            artifact = inductor_compile(graph, inputs, dict(options))
            blobs = {CODE: inductor_serialize(artifact), **_kernels(Path(folder))}
            return inductor_callable(artifact), blobs


@contextmanager
def loading(artifacts: list[Mapping[str, bytes | Path]]) -> Iterator[Callable[[bytes], PieceFn]]:
    """A function that loads the code blob of any of `artifacts`; their kernels are in place."""
    with tempfile.TemporaryDirectory(prefix="piecegraph-") as folder:
        for artifact in artifacts:
            _lay_out(artifact, Path(folder))
        with inductor_cache_directory(folder), inductor_options():
            yield lambda code: inductor_callable(inductor_deserialize(code))


def _kernels(folder: Path) -> Blobs:
    return {
        f"{KERNELS}{file.relative_to(folder).as_posix()}": file.read_bytes()
        for file in sorted(folder.rglob("*.so"))
    }


def _lay_out(artifact: Mapping[str, bytes | Path], folder: Path) -> None:
    for name, content in artifact.items():
        if not name.startswith(KERNELS):
            continue
        target = folder / name.removeprefix(KERNELS)
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            target.symlink_to(content)
        else:
            target.write_bytes(content)
