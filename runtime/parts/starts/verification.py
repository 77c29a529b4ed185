"""Verify the bundle of a warm start: trace the model again beside its steps and compare.

Every warm start does: what a model depends on has no end, so that no other start stands for it.
"""

from __future__ import annotations

import time

from ....compile.ir.compilation import CompileRequest
from ....compile.ir.plan import Plan
from ....errors import BundleStale
from ...core.records import NotVerified, Records, Stale, Verified
from ...core.report import verified
from .tracing_thread import TracingThread, beside_steps

LATEST_START_S = 5.0
"""A trace begins when the model is ready, and at most so long after `prepare`."""


class Verification:
    """Compares the bundle of one start with its model, in `thread` or in the calling one."""

    def __init__(self, request: CompileRequest, plan: Plan, records: Records) -> None:
        self._request = request
        self._plan = plan
        self._records = records
        self.thread = TracingThread(
            "piecegraph-verification",
            self._compare,
            self._failed,
            request.exchange,
            latest_start_s=LATEST_START_S,
        )

    def ready(self) -> None:
        """The model has what it needs to serve: the trace disturbs no start any more."""
        self.thread.wake.set()

    def refusal(self) -> str | None:
        """Compare now: why the bundle must not be used, on any rank."""
        refusal = self._compare() or verified(self._records)
        if self._request.exchange is None:
            return None if refusal is True else str(refusal)
        stated = self._request.exchange("verified bundle", {"refusal": refusal})
        found = [
            f"rank {i}: {o['refusal']}" for i, o in enumerate(stated) if o["refusal"] is not True
        ]
        return found[0] if found else None

    def _failed(self, error: Exception) -> str:
        self._records.add(NotVerified(f"{type(error).__name__}: {error}"))
        return ""

    def _compare(self) -> str:
        """The first difference, or nothing; records what was found."""
        from ....compile.verify import first_difference

        began, apart = time.perf_counter(), Records()
        request = beside_steps(self._request, apart, self.thread)
        try:
            difference = first_difference(request, self._plan)
        except Exception as error:
            return self._failed(error)
        seconds = round(time.perf_counter() - began, 3)
        if difference is not None:
            self._records.add(Stale(seconds, difference))
            return difference
        self._records.add(Verified(seconds))
        return ""


def stale(request: CompileRequest, difference: str) -> BundleStale:
    """The error of a start that may use nothing but its bundle."""
    return BundleStale(model=type(request.model).__qualname__, difference=difference)
