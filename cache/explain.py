"""Why a look-up missed: the nearest entries, and exactly which factors differ."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .files import read_file
from .keys import Difference, Key, diff
from .listing import entry_names
from .manifest import MAX_MANIFEST_BYTES, BadManifest, Manifest, decode


@dataclass(frozen=True, slots=True)
class Near:
    """An entry that exists; `differences` lead from its key to the one asked for, none if equal.

    `idle_since` is the time of its last use, in seconds since the epoch.
    """

    key: Key
    differences: tuple[Difference, ...]
    idle_since: float


def why(root: Path, kind: str, key: Key, at_most: int = 3) -> list[Near]:
    """The entries of `kind` in a directory with the fewest factors other than `key`'s.

    Nearest first, the one used last first among equals; empty if there is none of the same kind
    of key. Damaged and unreadable entries are passed over.
    """
    near = (
        Near(entry.key, tuple(diff(entry.key.factors, key.factors)), used)
        for entry, used in _manifests(root, kind)
        if entry.key.kind == key.kind
    )
    return heapq.nsmallest(at_most, near, key=lambda n: (len(n.differences), -n.idle_since))


def _manifests(root: Path, kind: str) -> Iterator[tuple[Manifest, float]]:
    with contextlib.suppress(OSError):
        for name in entry_names(root):
            if name.split("/")[1] == kind:
                with contextlib.suppress(OSError, BadManifest):
                    manifest, _ = decode(read_file(root / name, MAX_MANIFEST_BYTES))
                    yield manifest, (root / name).stat().st_mtime
