"""A capture session: prepared once, then any number of captures into one pool."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...errors import NoCaptureSession
from ...events import Events
from ..backends.ownership import Ownership
from ..backends.protocol import Capture, GraphBackend

# Garbage collection is paused for the whole process, and torch allows one capture at a time in it.
_ONE_AT_A_TIME = threading.RLock()


class CaptureSession:
    """The window in which captures happen; outside of it `begin` raises `NoCaptureSession`.

    Tensors that bridge two segments, and outputs, are held until `finalise`: before it no capture
    of this session can be given their memory. After it they live on as long as nothing else is
    captured or replayed in the pool, which is all that a replay needs: each one writes them anew.
    """

    def __init__(self, backend: GraphBackend, pool: Any, events: Events) -> None:
        self.backend = backend
        self.events = events
        self._pool = pool
        self._held: list[Tensor] = []
        self._open = True

    def begin(self, ownership: Ownership) -> Capture:
        if not self._open:
            raise NoCaptureSession()
        return self.backend.begin(self._pool, ownership)

    def hold(self, tensor: Tensor) -> None:
        self._held.append(tensor)

    def finalise(self) -> None:
        """Let later captures use the memory of the recordings made so far, which are complete."""
        self._held.clear()
        self.backend.settle(self._pool)

    def close(self) -> None:
        self._open = False
        self.finalise()


@contextmanager
def capture_session(
    backend: GraphBackend, pool: Any, events: Events, *, prepare: bool = True
) -> Iterator[CaptureSession]:
    """Open a session on `backend`; capture the largest sizes first, so that the rest fits in.

    `prepare` collects garbage, synchronises the device and flushes its caches, once; a capture
    between two steps goes without. No collection runs inside: it could free device memory in the
    middle of a capture. Sessions of several threads wait for one another.
    """
    with _ONE_AT_A_TIME, events.span("capture.session", backend=backend.name):
        if prepare:
            gc.collect()
            backend.prepare()
        collecting = gc.isenabled()
        gc.disable()
        session = CaptureSession(backend, pool, events)
        try:
            with backend.capture_stream():
                yield session
        finally:
            session.close()
            if collecting:
                gc.enable()
