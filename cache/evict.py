"""Keep a private directory within its limits; the least recently used entries are removed first.

No locks are needed. For a reader, a removed file is a miss, or is read to its end through the open
descriptor. A blob is renamed before it is checked: a writer that reuses it either published its
manifest before the second listing, and the blob is put back, or finds the blob missing when it
checks after publishing, and writes it again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..events import Events
from .files import Irregular, place
from .lock import owned_directory, remove_unowned
from .manifest import BadManifest, BlobRef, read_manifest
from .names import (
    LOCK_AREA,
    QUARANTINE_AREA,
    SCRATCH_AREA,
    blob_name,
    blob_names,
    entry_names,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept: `size` in bytes, blobs included; `age` in seconds since the last use.

    Files used or written less than `grace` seconds ago are always kept: a process may be about to
    read them. Quarantined files, and temporary ones without an owner's lock, are kept for at most
    `leftover` seconds.
    """

    size: float = 10 << 30
    age: float = math.inf
    grace: float = 600.0
    leftover: float = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class _Stored:
    """An entry with its seconds since the last use, and whether all its blobs are there."""

    name: str
    idle: float
    size: int
    blobs: frozenset[BlobRef]
    whole: bool


@dataclass(frozen=True, slots=True)
class Evicted:
    """How many entries and bytes were removed; `failure` is the error that ended it."""

    entries: int = 0
    bytes: int = 0
    failure: str | None = None


def evict(root: Path, limits: Limits, events: Events) -> Evicted:
    """Remove what exceeds `limits`, then the blobs that no entry needs. Never raises OSError."""
    try:
        entries = sorted(_stored(root), key=lambda entry: entry.idle)
        kept, removed = _divided(entries, limits)
        for entry in removed:
            (root / entry.name).unlink(missing_ok=True)
        freed = _remove_orphans(root, {ref for entry in kept for ref in entry.blobs}, limits.grace)
        remove_leftovers(root, limits)
    except OSError as error:
        events.emit("cache.evict_failed", level=logging.WARNING, reason=str(error))
        return Evicted(failure=str(error))
    if removed or freed:
        events.count("cache.evicted", len(removed))
        events.emit("cache.evict", entries=len(removed), kept=len(kept), bytes=freed)
    return Evicted(len(removed), freed)


def _stored(root: Path) -> Iterator[_Stored]:
    for name in entry_names(root):
        with contextlib.suppress(FileNotFoundError):
            size, idle = (root / name).lstat().st_size, _idle(root / name)
            blobs = _blobs(root / name)
            whole = all((root / blob_name(ref.sha256)).exists() for ref in blobs)
            yield _Stored(name, idle, size, blobs, whole)


def _blobs(path: Path) -> frozenset[BlobRef]:
    """The blobs of a manifest; none if it is damaged or removed.

    Raises any other OSError: a blob that is needed must not count as an orphan.
    """
    try:
        return frozenset(read_manifest(path).blobs.values())
    except (FileNotFoundError, Irregular, BadManifest):
        return frozenset()


def _divided(entries: Iterable[_Stored], limits: Limits) -> tuple[list[_Stored], list[_Stored]]:
    """Of entries, most recently used first, those to keep and those to remove.

    A shared blob counts once. An entry that lost a blob is of no use; one that is just being
    published may lack a blob for a moment.
    """
    kept: list[_Stored] = []
    removed: list[_Stored] = []
    blobs: set[BlobRef] = set()
    total = 0
    for entry in entries:
        size = entry.size + sum(ref.size for ref in entry.blobs - blobs)
        fits = entry.whole and total + size <= limits.size and entry.idle < limits.age
        if fits or entry.idle < limits.grace:
            total += size
            blobs |= entry.blobs
            kept.append(entry)
        else:
            removed.append(entry)
    return kept, removed


def _remove_orphans(root: Path, needed: set[BlobRef], grace: float) -> int:
    """Remove blobs older than `grace` that no entry needs; returns their bytes."""
    kept = {blob_name(ref.sha256) for ref in needed}
    orphans = [
        name for name in blob_names(root) if name not in kept and _idle(root / name) >= grace
    ]
    if not orphans:
        return 0
    with owned_directory(root / SCRATCH_AREA) as trash:
        for name in orphans:
            with contextlib.suppress(FileNotFoundError):
                os.replace(root / name, trash / Path(name).name)
        for ref in {ref for name in entry_names(root) for ref in _blobs(root / name)}:
            with contextlib.suppress(FileNotFoundError):
                place(trash / ref.sha256, root / blob_name(ref.sha256))
        return sum(path.lstat().st_size for path in trash.iterdir())


def remove_leftovers(root: Path, limits: Limits) -> None:
    """Remove temporary files of dead processes, and what quarantine and locks have too much of.

    Quarantined files may take 1/16 of the size limit; the newest are kept. Raises OSError.
    """
    remove_unowned(root / SCRATCH_AREA)
    quarantined = 0
    for area in (SCRATCH_AREA, QUARANTINE_AREA, LOCK_AREA):
        for path in sorted((root / area).glob("*"), key=_idle):
            with contextlib.suppress(FileNotFoundError):
                if area == QUARANTINE_AREA:
                    quarantined += sum(file.lstat().st_size for file in path.glob("*"))
                if _idle(path) > limits.leftover or quarantined > limits.size / 16:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _idle(path: Path) -> float:
    """Seconds since a file was used; negative infinity if it was removed.

    A file from the future counts as used now, and gets the time of now, so that it ages.
    """
    try:
        idle = time.time() - path.lstat().st_mtime
        if idle < 0:
            os.utime(path, follow_symlinks=False)
    except FileNotFoundError:
        return -math.inf
    return max(idle, 0.0)
