"""Single flight: of many processes that miss the same key, one compiles and the others wait.

The lock only saves work. A process that cannot get it, because the holder takes too long or the
file system has no locks, goes on without it, and two publishes of one key do no harm. The system
releases the lock of a process that dies, so a waiter goes on at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def single_flight(
    path: Path, label: str, events: Events, wait_limit: float, progress_every: float
) -> Iterator[Flight]:
    """Hold the lock at `path`; yields UNLOCKED without it.

    Waits at most `wait_limit` seconds, with an event `cache.wait` every `progress_every` seconds.
    Not reentrant: a second flight for the same key in one thread waits for the limit.
    """
    from filelock import FileLock

    lock = FileLock(path, mode=0o600)
    flight = _acquire(lock, path, label, events, wait_limit, progress_every)
    try:
        yield flight
    finally:
        if flight is not Flight.UNLOCKED:
            lock.release()


def _acquire(
    lock: FileLock, path: Path, label: str, events: Events, wait_limit: float, every: float
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
        except OSError as error:
            return _go_on_unlocked(events, label, f"locking failed: {error}")
        else:
            waited = time.monotonic() - began
            events.emit("cache.flight", entry=label, waited_seconds=round(waited, 3))
            return flight
        if waited >= wait_limit:
            return _go_on_unlocked(events, label, f"another process has held it for {wait_limit} s")
        if flight is Flight.AFTER_OTHERS:
            events.emit("cache.wait", level=logging.INFO, entry=label, seconds=round(waited, 1))
        flight, left = Flight.AFTER_OTHERS, min(every, wait_limit - waited)


def _go_on_unlocked(events: Events, label: str, reason: str) -> Flight:
    events.count("cache.duplicate_work")
    events.emit("cache.flight", level=logging.WARNING, entry=label, alone=reason)
    return Flight.UNLOCKED
