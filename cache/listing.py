"""What lies in a directory: for eviction, verification and explanation, never to find an entry."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from .files import read_file
from .manifest import MAX_MANIFEST_BYTES, BadManifest, Manifest, decode
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


def read_manifest(path: Path) -> Manifest:
    """Raises OSError or BadManifest."""
    manifest, _ = decode(read_file(path, MAX_MANIFEST_BYTES))
    return manifest


def pass_over(name: str, error: Exception) -> None:
    """Leave out a manifest that cannot be read."""


def manifests(
    root: Path, kind: str | None = None, unreadable: Callable[[str, Exception], None] = pass_over
) -> Iterator[tuple[Manifest, float]]:
    """Every manifest, of one kind if given, and its last use in seconds since the epoch.

    `unreadable` is told the relative name of each that cannot be read, and why. Raises OSError
    where a directory cannot be listed.
    """
    for name in entry_names(root):
        if kind not in (None, name.split("/")[1]):
            continue
        try:
            found = read_manifest(root / name), (root / name).stat().st_mtime
        except (OSError, BadManifest) as error:
            unreadable(name, error)
        else:
            yield found


def _listed(directory: Path) -> list[str]:
    """Names in a directory; none if it is gone or no directory. Raises any other OSError."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
