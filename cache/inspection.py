"""Look through a directory of entries: list them, verify them, find those nearest to a key."""

from __future__ import annotations

import contextlib
import functools
import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from operator import or_
from pathlib import Path

from ..errors import UntrustedDirectory
from .directory import DirectoryLayer
from .files import check_private
from .keys.key import Difference, Key, diff
from .layers import Miss, find
from .manifest import BadManifest, Manifest, is_intact, read_manifest
from .names import blob_names, entry_names, is_digest, is_name
from .signing import Trust, trust_all


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


class Status(IntFlag):
    """Exit statuses of `cache verify`, those of `nix store verify`; they are summed."""

    CLEAN = 0
    CORRUPT = 1
    UNTRUSTED = 2
    UNVERIFIABLE = 4


@dataclass(frozen=True, slots=True)
class Defect:
    """One fault; `name` is relative to the directory."""

    status: Status
    name: str
    reason: str


def verify(root: Path, trust: Trust | None = None) -> list[Defect]:
    """The faults of all entries and blobs under `root`; changes nothing.

    Without `trust` the directory must be private, with it every entry must satisfy it.
    """
    defects = [] if trust is not None else list(_check_openness(root))
    layer = DirectoryLayer(root, trust or trust_all)
    try:
        for name in entry_names(root):
            defects += _check_entry(layer, name)
        for name in blob_names(root):
            if not is_intact(name, root / name):
                defects.append(Defect(Status.CORRUPT, name, "not the bytes of its name"))
    except OSError as error:
        defects.append(Defect(Status.UNVERIFIABLE, ".", str(error)))
    return defects


def exit_status(defects: Iterable[Defect]) -> int:
    """The statuses that occur, summed."""
    return int(functools.reduce(or_, (defect.status for defect in defects), Status.CLEAN))


def _check_openness(root: Path) -> Iterator[Defect]:
    try:
        check_private(Path(os.path.realpath(root)))
    except UntrustedDirectory as error:
        yield Defect(Status.UNTRUSTED, ".", str(error))
    except OSError as error:
        yield Defect(Status.UNVERIFIABLE, ".", str(error))


def _check_entry(layer: DirectoryLayer, name: str) -> list[Defect]:
    _, kind, prefix, digest = name.split("/")
    if not is_name(kind) or not is_digest(digest) or prefix != digest[:2]:
        return [Defect(Status.UNVERIFIABLE, name, "no entry has this name")]
    result = find(layer, kind, digest)
    if not isinstance(result, Miss):
        return []
    # it may be absent because it was removed since it was listed
    status = _STATUS.get(result.reason, Status.UNVERIFIABLE)
    return [Defect(status, name, result.detail)]


_STATUS = {"damaged": Status.CORRUPT, "untrusted": Status.UNTRUSTED}
