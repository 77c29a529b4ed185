"""An artifact: the stored forms of one unique piece, as named blobs that have been verified.

`code` with `kernel.*`, the `compiler` that made them and `probe.*` that it was asked with is
Inductor's standalone artifact (see `inductor`), ready soonest. `library` is an AOTInductor library
(see `aoti`), which takes longer to build and loads in a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PieceFn = Callable[[list[Any]], Any]
"""A piece takes one list of tensors and sizes and returns a sequence of tensors."""

Blobs = Mapping[str, bytes]

Finish = Callable[[], tuple[PieceFn, Blobs]]
"""Waits for what is still being compiled of a piece; its callable, and the artifact to keep."""

CODE = "code"
KERNEL = "kernel."
PROBE = "probe."
COMPILER = "compiler"
LIBRARY = "library"


@dataclass(frozen=True)
class Artifact:
    """Blobs by name; `path` gives a file with a blob's bytes, for what loads from files."""

    blobs: Blobs
    path: Callable[[str], Path]


def kernels(artifacts: Sequence[Blobs]) -> list[int]:
    """How many compiled libraries each artifact holds."""
    return [sum(name.startswith(KERNEL) for name in artifact) for artifact in artifacts]
