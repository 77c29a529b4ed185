"""A lease in a shared layer: of many machines that miss the same key, one compiles.

The holder creates a file, which fails if there is one, and writes to it again while it lives. Who
waits compares the content, and never times: clocks of machines differ by days. A lease that did not
change for `EXPIRES_SECONDS` is that of a dead process, and is removed. As a lock it only saves
work: a machine that cannot get it continues without it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..events import Events
from .lock import Flight, go_on_unlocked
from .remote import RemoteLayer

EXPIRES_SECONDS = 60.0
POLL_SECONDS = 1.0
FAILURES = 3
"""Polls in a row that may fail: fewer are a server that is busy."""

_MAX_BYTES = 100


@dataclass(frozen=True)
class Lease:
    """The lease `name` in a layer, to make `entry`; `label` is its name in events."""

    layer: RemoteLayer
    name: str
    entry: str
    label: str
    events: Events
    waiting: Callable[..., None]
    """Called with the layer and the seconds of a wait so far."""

    @contextlib.contextmanager
    def flight(self, wait_limit: float, progress_every: float) -> Iterator[Flight]:
        """Hold the lease, or wait until it is free or the entry is stored meanwhile.

        AFTER_OTHERS after a wait, and if the entry is there; UNLOCKED after `wait_limit` seconds,
        and if the layer fails.
        """
        holder = secrets.token_hex(8).encode()
        held, flight = self._acquire(holder, wait_limit, progress_every)
        if not held:
            yield flight
            return
        ended = threading.Event()
        renewing = threading.Thread(
            target=self._renew, args=(holder, ended), name="piecegraph-lease", daemon=True
        )
        renewing.start()
        self.layer.leased.add(self.entry)
        try:
            yield flight
        finally:
            self.layer.leased.discard(self.entry)
            ended.set()
            renewing.join()
            with contextlib.suppress(OSError):
                if (self._content() or b"").startswith(holder):
                    self.layer.remove(self.name)

    def _content(self) -> bytes | None:
        return self.layer.look(self.name, _MAX_BYTES)

    def _acquire(self, holder: bytes, wait_limit: float, every: float) -> tuple[bool, Flight]:
        """Whether the lease is held, and after which wait."""
        began = changed = told = time.monotonic()
        seen: bytes | None = None
        was_there: bool | None = None
        failures, flight = 0, Flight.FIRST
        while True:
            now = time.monotonic()
            try:
                content = self._content()
                # after the lease: its holder stores the entry before giving it back
                is_there = self.layer.look(self.entry, 1) is not None
                was_there = is_there if was_there is None else was_there
                if is_there:
                    flight = Flight.AFTER_OTHERS
                if is_there and not was_there:
                    return False, flight
                if content is None and self.layer.create(self.name, holder):
                    waited = round(now - began, 3)
                    self.events.emit("cache.flight", entry=self.label, waited_seconds=waited)
                    return True, flight
                flight = Flight.AFTER_OTHERS
                if content != seen:
                    seen, changed = content, now
                elif now - changed > EXPIRES_SECONDS:
                    self.layer.remove(self.name)
                failures = 0
            except OSError as error:
                failures += 1
                if failures == FAILURES:
                    return False, go_on_unlocked(self.events, self.label, str(error))
            if now - began >= wait_limit:
                reason = f"another machine has held it for {wait_limit:g} s"
                return False, go_on_unlocked(self.events, self.label, reason)
            if now - told >= every:
                told = now
                self.waiting(layer=self.layer.name, seconds=round(now - began, 1))
            time.sleep(POLL_SECONDS)

    def _renew(self, holder: bytes, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(EXPIRES_SECONDS / 4):
            count += 1
            with contextlib.suppress(OSError):
                content = self._content()
                if content is None:  # a purge from outside
                    self.layer.create(self.name, holder)
                elif content.startswith(holder):
                    self.layer.overwrite(self.name, holder + f" {count}".encode())
                else:
                    go_on_unlocked(self.events, self.label, "another machine has taken the lease")
                    return
