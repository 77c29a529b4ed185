"""A capture session: prepared once, then any number of captures into one pool."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.locations import error_line
from ...errors import CaptureFailed, CaptureOutOfMemory, NoCaptureSession
from ...events import Events
from ...torch_compat.basics.ops import call_kernel, is_collective
from ..backends.ownership import EachOp, Ownership
from ..backends.protocol import Capture, GraphBackend
from ..core.exchange import CaptureAgreement

ONE_AT_A_TIME = threading.RLock()
"""A lock, not state: garbage collection is paused, and what calls operators and codes is replaced,
in the whole process, and torch allows one capture in it at a time."""


class _Meetings(EachOp):
    """Ranks agree before each collective of a run."""

    def __init__(self, agreement: CaptureAgreement) -> None:
        super().__init__(lambda op, args, kwargs: agree_before(agreement, op), call_kernel)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Regions that the model compiles run compiled, and are not compiled once more."""
        return True


def agree_before(agreement: CaptureAgreement, op: Any) -> None:
    """If `op` is a collective, ranks agree before it that none has failed."""
    if is_collective(op):
        agreement.before(str(op))


def agreeing(agreement: CaptureAgreement) -> AbstractContextManager[Any]:
    """Around runs of model code that are no steps, and that meet other ranks as a step does."""
    return nullcontext() if agreement.alone else _Meetings(agreement)


class CaptureSession:
    """The window in which captures happen; outside of it `begin` raises NoCaptureSession.

    Tensors that connect two segments, and outputs, are held until `finalize`, so that no capture in
    between is given their memory. Later captures may share it: every replay writes it again before
    it reads it. `agreement` is that of the ranks on the capture in progress.
    """

    def __init__(self, backend: GraphBackend, pool: Any, events: Events) -> None:
        self.backend = backend
        self.events = events
        self.agreement = CaptureAgreement()
        self._pool = pool
        self._held: list[Tensor] = []
        self._open = True

    def begin(self, ownership: Ownership) -> Capture:
        if not self._open:
            raise NoCaptureSession()
        return self.backend.begin(self._pool, ownership)

    def hold(self, tensor: Tensor) -> None:
        self._held.append(tensor)

    def finalize(self) -> None:
        """The recordings made so far are complete: later captures may share their memory."""
        self._held.clear()
        self.backend.release_held(self._pool)

    def recover(self) -> None:
        """After a capture that ran out of memory: give back what it left, for smaller ones."""
        gc.collect()
        with suppress(RuntimeError):
            self.backend.trim()

    def close(self) -> None:
        self._open = False
        self.finalize()


@contextmanager
def capture_session(
    backend: GraphBackend, pool: Any, events: Events, *, prepare: bool = True
) -> Iterator[CaptureSession]:
    """Open a session on `backend`. Capture the largest size first: smaller ones share its memory.

    `prepare` collects garbage, synchronizes the device and flushes its caches, once; captures
    between steps skip that. Garbage collection is paused inside: it could free device memory in
    the middle of a capture. Sessions of several threads run one after the other.
    """
    with ONE_AT_A_TIME, events.span("capture.session", backend=backend.name):
        if prepare:
            gc.collect()
            try:
                backend.prepare()
            except RuntimeError as error:
                raise capture_failure(error, "any graph") from error
        was_enabled = gc.isenabled()
        session = CaptureSession(backend, pool, events)
        try:
            gc.disable()
            yield session
        finally:
            if was_enabled:  # first: what follows may be interrupted
                gc.enable()
            session.close()
            if prepare:  # memory that dummy batches cached; it can wait for a later session
                with suppress(RuntimeError):
                    backend.trim()


def capture_failure(error: Exception, name: str) -> CaptureFailed:
    """The error to raise when `error` stopped the capture of `name`."""
    kind = CaptureOutOfMemory if isinstance(error, torch.OutOfMemoryError) else CaptureFailed
    reasons = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    stated = getattr(error, "where", None) or hasattr(error, "__notes__")
    where = None if stated else error_line(error)
    if not (stated or where):  # none of the user's lines: that of the library
        raised = traceback.extract_tb(error.__traceback__)[-1]
        reasons.append(f"raised at {raised.filename}:{raised.lineno}")
    return kind(where=where, name=name, reason=", ".join(reasons))
