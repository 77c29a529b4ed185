"""Why a look-up missed: the nearest entries, and exactly which factors differ."""

from __future__ import annotations

import contextlib
import heapq
from dataclasses import dataclass
from pathlib import Path

from .keys.key import Difference, Key, diff
from .listing import manifests


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
    near = []
    with contextlib.suppress(OSError):
        for entry, used in manifests(root, kind):
            if entry.key.kind == key.kind:
                differences = tuple(diff(entry.key.factors, key.factors))
                near.append(Near(entry.key, differences, used))
    return heapq.nsmallest(at_most, near, key=lambda n: (len(n.differences), -n.idle_since))
