"""What lies in a directory: for eviction, verification and explanation, never to find an entry."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def entry_names(root: Path) -> Iterator[str]:
    """Relative names of all files where manifests belong, sorted within each directory."""
    for kind in _listed(root / "entries"):
        for prefix in _listed(root / "entries" / kind):
            for digest in _listed(root / "entries" / kind / prefix):
                yield f"entries/{kind}/{prefix}/{digest}"


def blob_names(root: Path) -> Iterator[str]:
    """Relative names of all files where blobs belong."""
    for prefix in _listed(root / "blobs"):
        for digest in _listed(root / "blobs" / prefix):
            yield f"blobs/{prefix}/{digest}"


def _listed(directory: Path) -> list[str]:
    """Names in a directory; none if another process has removed it or it is no directory."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
