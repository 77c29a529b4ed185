"""Locks that the system releases when a process dies: single flight, and owned directories.

Single flight: of many processes that miss the same key, one compiles and the others wait. The lock
only saves work. A process that cannot get it, because the holder takes too long or locking fails,
continues without it; publishing one key twice is safe.

An owned directory holds temporary files and is locked by its process, so that the next process can
distinguish the files of a killed process from those in use. Without locks, as on some network file
systems, only the age of a directory decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from ..events import Events

if TYPE_CHECKING:  # not needed on a warm start
    from filelock import FileLock

POLL_SECONDS = 0.05


class Flight(Enum):
    """How the lock was acquired: free, after a process that may have done the work, or not held."""

    FIRST = auto()
    AFTER_OTHERS = auto()
    UNLOCKED = auto()


@contextlib.contextmanager
def single_flight(
    path: Path,
    label: str,
    events: Events,
    wait_limit: float,
    progress_every: float,
    waiting: Callable[..., None],
) -> Iterator[Flight]:
    """Hold the lock at `path`; yields UNLOCKED without it.

    Waits at most `wait_limit` seconds, and calls `waiting(seconds=...)` every `progress_every`.
    Not reentrant: a second flight for the same key in one thread waits for the limit.
    """
    try:
        from filelock import FileLock

        lock = FileLock(path, mode=0o600)
    except OSError as error:  # no file descriptor is left for the import
        yield go_on_unlocked(events, label, f"locking failed: {error}")
        return
    flight = _acquire(lock, path, label, events, wait_limit, progress_every, waiting)
    try:
        yield flight
    finally:
        if flight is not Flight.UNLOCKED:
            lock.release()


def _acquire(
    lock: FileLock,
    path: Path,
    label: str,
    events: Events,
    wait_limit: float,
    every: float,
    waiting: Callable[..., None],
) -> Flight:
    from filelock import Timeout

    began = time.monotonic()
    flight, left = Flight.FIRST, 0.0
    while True:
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            lock.acquire(timeout=left, poll_interval=POLL_SECONDS)
        except Timeout:
            waited = time.monotonic() - began
        except (OSError, NotImplementedError) as error:  # of older versions, without flock
            return go_on_unlocked(events, label, f"locking failed: {error}")
        else:
            waited = time.monotonic() - began
            events.emit("cache.flight", entry=label, waited_seconds=round(waited, 3))
            return flight
        if waited >= wait_limit:
            return go_on_unlocked(events, label, f"another process has held it for {wait_limit} s")
        if flight is Flight.AFTER_OTHERS:
            waiting(seconds=round(waited, 1))
        flight, left = Flight.AFTER_OTHERS, min(every, wait_limit - waited)


def go_on_unlocked(events: Events, label: str, reason: str) -> Flight:
    """Report that work may be done twice."""
    events.count("cache.duplicate_work")
    events.emit("cache.flight", level=logging.WARNING, entry=label, alone=reason)
    return Flight.UNLOCKED


OWNED = "owned-"
"""Prefix of owned directories in the cache."""

TEMPORARY = "piecegraph-owned-"
"""Prefix of owned directories elsewhere, such as the system's directory for temporary files."""


@contextlib.contextmanager
def owned_directory(parent: Path, prefix: str = OWNED) -> Iterator[Path]:
    """A new directory that is locked until it is removed. A failure to remove it is ignored."""
    path, descriptor = create_owned(parent, prefix)
    try:
        yield path
    finally:
        remove_owned(path, descriptor)


def temporary_directory() -> contextlib.AbstractContextManager[Path]:
    """An owned directory in the system's directory for temporary files."""
    return owned_directory(Path(tempfile.gettempdir()), TEMPORARY)


def create_owned(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock, for `remove_owned`."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process has removed it as unowned
        except OSError:
            path.rmdir()
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue  # another process is removing it
        except OSError:
            return path, descriptor  # no locks here
        if path.exists():
            return path, descriptor
        os.close(descriptor)


def remove_owned(path: Path, descriptor: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def remove_unowned(parent: Path, prefix: str = OWNED) -> None:
    """Remove this user's owned directories whose process has died. Errors are ignored."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(prefix):
                with contextlib.suppress(OSError):
                    _remove_if_unowned(parent / name)


def _remove_if_unowned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is in use
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
