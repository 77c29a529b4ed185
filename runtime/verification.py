"""Verify the bundle of a warm start: trace the model again beside its steps and compare.

Every warm start does: what a model depends on has no end, so that no other start stands for it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..compile.ir.compilation import CompileRecords, CompileRequest
from ..compile.ir.plan import Plan
from ..errors import BundleStale
from .records import NotVerified, Records, Stale, Verified
from .steps.usage import IdleSteps
from .tracing_thread import TracingThread

LATEST_START_S = 5.0
"""A trace begins when the model is ready, and at most so long after `prepare`."""


class Verification:
    """Compares the bundle of one start with its model, in a thread or in the calling one."""

    def __init__(self, request: CompileRequest, plan: Plan, records: Records) -> None:
        self.request = request
        self.records = records
        self.difference: str | None = None
        self._plan = plan
        self._ready = threading.Event()
        self._refused: Callable[[], Callable[[], None] | None] = lambda: None
        self._thread = TracingThread("piecegraph-verification", self._wait_and_compare)

    def start(self, refused: Callable[[], None]) -> None:
        """Compare in a thread, soon after `ready` is called.

        `refused`, a method of a model that this does not keep alive, is called there if they
        differ.
        """
        self._refused = weakref.WeakMethod(refused)
        self._thread.start()

    def ready(self) -> None:
        """The model has what it needs to serve: the trace disturbs no start any more."""
        self._ready.set()

    def join(self, timeout_s: float | None) -> None:
        """Wait for the end."""
        self._ready.set()
        self._thread.join(timeout_s)

    def stop(self) -> None:
        """End the comparison. Idempotent."""
        self._thread.stop()
        self._ready.set()

    def agreed(self) -> str | None:
        """Compare now: the first difference, on any rank."""
        self._compare()
        if self.request.exchange is None:
            return self.difference
        stated = self.request.exchange("verified bundle", {"difference": self.difference})
        found = [f"rank {i}: {o['difference']}" for i, o in enumerate(stated) if o["difference"]]
        return found[0] if found else None

    def _wait_and_compare(self) -> None:
        self._ready.wait(LATEST_START_S)
        self._thread.checkpoint()
        self._compare()
        if self.difference is not None and (refused := self._refused()) is not None:
            refused()

    def _compare(self) -> None:
        from ..compile.verify import first_difference

        began, apart = time.perf_counter(), Records()
        request = replace(
            self.request,
            records=CompileRecords(),
            events=apart.events,
            serving=True,
            checkpoint=self._thread.checkpoint,
        )
        try:
            self.difference = first_difference(request, self._plan)
        except Exception as error:
            self.records.add(NotVerified(f"{type(error).__name__}: {error}"))
            return
        seconds = round(time.perf_counter() - began, 3)
        if self.difference is not None:
            self.records.add(Stale(seconds, self.difference))
            return
        self.records.add(Verified(seconds))


class Refusal:
    """Stands before the steps of a model whose bundle is stale: the next one leaves the bundle."""

    active = True

    def __init__(self, leave: Callable[[], None]) -> None:
        self.idle_steps: dict[int, IdleSteps] = {}
        self._leave = leave

    def before_step(self, *step: Any) -> bool:
        """Leave the bundle. The step may be decided otherwise now."""
        self._leave()
        return True


def stale(request: CompileRequest, difference: str) -> BundleStale:
    """The error of a start that may use nothing but its bundle."""
    return BundleStale(model=type(request.model).__qualname__, difference=difference)
