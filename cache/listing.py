"""What lies in a directory: for eviction, verification and explanation, never to find an entry."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .names import BLOB_AREA, ENTRY_AREA


def entry_names(root: Path) -> Iterator[str]:
    """Relative names of all files where manifests belong, sorted within each directory."""
    for kind in _listed(root / ENTRY_AREA):
        for prefix in _listed(root / ENTRY_AREA / kind):
            for digest in _listed(root / ENTRY_AREA / kind / prefix):
                yield f"{ENTRY_AREA}/{kind}/{prefix}/{digest}"


def blob_names(root: Path) -> Iterator[str]:
    """Relative names of all files where blobs belong."""
    for prefix in _listed(root / BLOB_AREA):
        for digest in _listed(root / BLOB_AREA / prefix):
            yield f"{BLOB_AREA}/{prefix}/{digest}"


def _listed(directory: Path) -> list[str]:
    """Names in a directory; none if it is gone or no directory. Raises any other OSError."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
