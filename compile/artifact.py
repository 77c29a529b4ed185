"""An artifact: the stored forms of one unique piece, as named blobs that have been verified.

`code` with `kernel.*` and the `compiler` that made them is Inductor's standalone artifact (see
`inductor`), ready soonest. `library` is an AOTInductor library (see `aoti`), which takes longer to
build and loads in a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PieceFn = Callable[[list[Any]], Any]
"""A piece takes one list of tensors and sizes and returns a sequence of tensors."""

Blobs = Mapping[str, bytes]

CODE = "code"
KERNEL = "kernel."
COMPILER = "compiler"
LIBRARY = "library"


@dataclass(frozen=True)
class Artifact:
    """Blobs by name; `path` gives a file with a blob's bytes, for what loads from files."""

    blobs: Blobs
    path: Callable[[str], Path]
