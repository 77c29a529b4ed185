"""Single flight: of many that miss the same key, one compiles and the others wait.

The lock saves work and nothing else: whoever cannot have it, because its holder takes too long or
the file system has no locks, goes on without it, and two publishes of one key do no harm. The
system drops the lock of a process that dies, so that a waiter goes on at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..events import Events

POLL_SECONDS = 0.05


@contextmanager
def single_flight(
    path: Path, label: str, events: Events, wait_limit: float, progress_every: float
) -> Iterator[bool]:
    """Hold the lock at `path`; gives whether it is held.

    Waits at most `wait_limit` seconds, with an event `cache.wait` every `progress_every` seconds.
    Not re-entrant: a second flight for the same key in one thread waits for the limit.
    """
    lock = FileLock(path, mode=0o600)
    held = _acquire(lock, path, label, events, wait_limit, progress_every)
    try:
        yield held
    finally:
        if held:
            lock.release()


def _acquire(
    lock: FileLock, path: Path, label: str, events: Events, wait_limit: float, every: float
) -> bool:
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            left = max(0.0, min(every, wait_limit - waited))
            lock.acquire(timeout=left, poll_interval=POLL_SECONDS)
        except Timeout:
            waited = time.monotonic() - began
        except OSError as error:
            return _alone(events, label, f"no lock can be had: {error}")
        else:
            events.emit("cache.flight", entry=label, waited_seconds=round(waited, 3))
            return True
        if waited >= wait_limit:
            return _alone(events, label, f"another process has held it for {wait_limit} s")
        events.emit("cache.wait", level=logging.INFO, entry=label, seconds=round(waited, 1))


def _alone(events: Events, label: str, reason: str) -> bool:
    events.count("cache.duplicate_work")
    events.emit("cache.flight", level=logging.WARNING, entry=label, alone=reason)
    return False
