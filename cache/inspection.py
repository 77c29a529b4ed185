"""Look through a directory of entries: list them, find those nearest to a key."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .keys.key import Difference, Key, diff
from .manifest import BadManifest, Manifest, read_manifest
from .names import entry_names


def manifests(
    root: Path,
    kind: str | None = None,
    unreadable: Callable[[str, Exception], None] = lambda name, error: None,
) -> Iterator[tuple[Manifest, float]]:
    """Every manifest, of one kind if given, and its last use in seconds since the epoch.

    `unreadable` is called with the relative name of each that cannot be read, and the error.
    Raises OSError if a directory cannot be listed.
    """
    for name in entry_names(root):
        if kind not in (None, name.split("/")[1]):
            continue
        try:
            manifest, last_use = read_manifest(root / name), (root / name).stat().st_mtime
        except (OSError, BadManifest) as error:
            unreadable(name, error)
        else:
            yield manifest, last_use


@dataclass(frozen=True, slots=True)
class NearEntry:
    """An existing entry; `differences` are from its key to the requested one, empty if equal.

    `last_use` is in seconds since the epoch.
    """

    key: Key
    differences: tuple[Difference, ...]
    last_use: float


def nearest_entries(root: Path, kind: str, key: Key, at_most: int = 3) -> list[NearEntry]:
    """The entries of `kind` in a directory whose keys differ from `key` in the fewest factors.

    Nearest first, the most recently used first among equals; empty if none has the same kind of
    key. Damaged and unreadable entries are skipped.
    """
    near = []
    with contextlib.suppress(OSError):
        for entry, used in manifests(root, kind):
            if entry.key.kind == key.kind:
                differences = tuple(diff(entry.key.factors, key.factors))
                near.append(NearEntry(entry.key, differences, used))
    return heapq.nsmallest(at_most, near, key=lambda n: (len(n.differences), -n.last_use))
