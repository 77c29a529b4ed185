"""A lease in a shared layer: of many machines that miss the same key, one compiles.

The holder creates a file, which fails if there is one, and writes to it again while it lives. Who
waits compares the content, and never times: clocks of machines differ by days. A lease that did not
change for `EXPIRES_SECONDS` is that of a dead process, and is removed. As a lock it only saves
work: whoever cannot get it continues without it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from ..events import Events
from .lock import Flight

EXPIRES_SECONDS = 60.0
POLL_SECONDS = 1.0
_MAX_BYTES = 100


@runtime_checkable
class Leasing(Protocol):
    """A layer that leases can be in. All methods raise OSError."""

    @property
    def writable(self) -> bool: ...

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that must not exist; whether it did not."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Write a file."""
        ...

    def read_again(self, name: str, limit: int) -> bytes:
        """As `read`, also where the file was missing before."""
        ...

    def remove(self, name: str) -> None: ...


@contextlib.contextmanager
def lease(
    layer: Leasing,
    name: str,
    is_done: Callable[[], bool],
    label: str,
    events: Events,
    wait_limit: float,
    progress_every: float,
) -> Iterator[Flight]:
    """Hold the lease `name`, or wait until it is free or the work is done meanwhile.

    AFTER_OTHERS after a wait, and if the work is done; UNLOCKED after `wait_limit` seconds, and if
    the layer fails.
    """
    holder = secrets.token_hex(8)
    try:
        held, flight = _acquire(
            layer, name, holder, is_done, label, events, wait_limit, progress_every
        )
    except OSError as error:
        events.emit("cache.flight", level=logging.WARNING, entry=label, alone=str(error))
        held, flight = False, Flight.UNLOCKED
    if not held:
        yield flight
        return
    ended = threading.Event()
    renewing = threading.Thread(
        target=_renew, args=(layer, name, holder, ended), name="piecegraph-lease", daemon=True
    )
    renewing.start()
    try:
        yield flight
    finally:
        ended.set()
        renewing.join()
        with contextlib.suppress(OSError):
            if layer.read_again(name, _MAX_BYTES).startswith(holder.encode()):
                layer.remove(name)


def _acquire(
    layer: Leasing,
    name: str,
    holder: str,
    is_done: Callable[[], bool],
    label: str,
    events: Events,
    wait_limit: float,
    every: float,
) -> tuple[bool, Flight]:
    """Whether the lease is held, and after which wait."""
    began = changed = told = time.monotonic()
    seen: bytes | None = None
    was_done = is_done()
    while not layer.create(name, holder.encode()):
        now = time.monotonic()
        if now - began >= wait_limit:
            events.count("cache.duplicate_work")
            reason = f"another machine has held it for {wait_limit} s"
            events.emit("cache.flight", level=logging.WARNING, entry=label, alone=reason)
            return False, Flight.UNLOCKED
        with contextlib.suppress(FileNotFoundError):
            content = layer.read_again(name, _MAX_BYTES)
            if content != seen:
                seen, changed = content, now
            elif now - changed > EXPIRES_SECONDS:
                layer.remove(name)
        if now - told >= every:
            told = now
            events.emit(
                "cache.wait", level=logging.INFO, entry=label, seconds=round(now - began, 1)
            )
        time.sleep(POLL_SECONDS)
        if not was_done and is_done():
            return False, Flight.AFTER_OTHERS
    waited = time.monotonic() - began
    events.emit("cache.flight", entry=label, waited_seconds=round(waited, 3))
    return True, Flight.FIRST if seen is None and not is_done() else Flight.AFTER_OTHERS


def _renew(layer: Leasing, name: str, holder: str, ended: threading.Event) -> None:
    count = 0
    while not ended.wait(EXPIRES_SECONDS / 4):
        count += 1
        with contextlib.suppress(OSError):
            layer.replace(name, f"{holder} {count}".encode())
