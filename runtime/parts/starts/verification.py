"""Verify the bundle of a warm start: trace the model again beside its steps and compare.

Three outcomes: equal; different, which two traces show in the same way; not known, after which it
is tried again and no step is stopped. A cold start traces what Python holds in `prepare`: where
steps set what the forward reads, a trace beside them finds another program, and nothing is known.
Every warm start is verified: what a model depends on has no end, so that no other start stands for
it.
"""

from __future__ import annotations

import time

from ....compile.bundle.bundle import broken_condition
from ....compile.ir.compilation import CompileRequest
from ....compile.plan.compiled_model import CompiledModel
from ....errors import BundleStale
from ...core.exchange import by_rank
from ...core.records import NotVerified, Records, Stale, Verified
from ...core.report import verified
from .tracing_thread import NotKnown, TracingThread, beside_steps, reason_of

LATEST_START_S = 5.0
"""A trace begins when the model is ready, and at most so long after `prepare`."""

LOOKS, LOOK_S = 10, 0.005
"""How often conditions are looked at after a trace that differs, and the pause in between."""


class Verification:
    """Compares the bundle of one start with its model, in `thread` or in the calling one.

    A rank that has compiled the model itself has nothing to compare, and goes by the others.
    """

    def __init__(self, request: CompileRequest, found: CompiledModel, records: Records) -> None:
        self._request = request
        self._loaded = found.from_bundle
        self._plan = found.plan
        self._conditions = found.conditions
        self._records = records
        self._difference = ""
        """What the last try found."""
        self.thread = TracingThread(
            "piecegraph-verification",
            self._verify,
            self._failed,
            request.exchange,
            LATEST_START_S,
            request.state,
        )

    def ready(self) -> None:
        """Trace now: the model has what it needs to serve, or the engine has time."""
        self.thread.wake.set()

    def refusal(self) -> str | None:
        """Compare now, once: why the bundle must not be used, on any rank."""
        refusal = self._refusal() if self._loaded else ""
        if self._request.exchange is None:
            return refusal or None
        stated = self._request.exchange("verified bundle", {"refusal": refusal})
        return next(iter(by_rank(stated, "refusal")), None)

    def _refusal(self) -> str:
        try:
            difference, seconds = self._compared()
        except Exception as error:
            self._failed(error)
        else:
            self._records.add(Stale(seconds, difference) if difference else Verified(seconds))
        refusal = difference if self._records.of(Stale) else verified(self._records)
        return "" if refusal is True else str(refusal)

    def _failed(self, error: Exception) -> str:
        """Nothing is known yet, or for good: no failure."""
        self._records.add(NotVerified(reason_of(error)))
        return ""

    def _verify(self) -> str:
        """In the thread: the first difference, or nothing. Stale the second time."""
        if not self._loaded:
            return ""
        before, self._difference = self._difference, ""
        changed = self._changed()
        try:
            difference, seconds = self._compared()
            failed = None
        except Exception as error:
            difference, failed = reason_of(error), error
        if difference and (changed := changed or self._changed(LOOKS)):
            failed = NotKnown(changed)
        if failed is not None:
            self._failed(failed)
            raise NotKnown(str(verified(self._records))) from failed
        self._difference = difference
        if not self._difference:
            self._records.add(Verified(seconds))
        elif self._difference == before:
            self._records.add(Stale(seconds, before))
        else:
            self._failed(NotKnown(f"one trace differs: {self._difference}"))
        return self._difference

    def _changed(self, looks: int = 1) -> str:
        """A condition of the bundle that held in `prepare` and does not now; or nothing."""
        for look in range(looks):
            time.sleep(LOOK_S if look else 0)
            self.thread.checkpoint()
            if broken := broken_condition(self._conditions, self._request.model):
                return f"what the forward reads has changed since `prepare`: {broken}"
        return ""

    def _compared(self) -> tuple[str, float]:
        """The first difference, or nothing, and the seconds that it took."""
        from ....compile.verify import trace_difference

        began, apart = time.perf_counter(), Records()
        request = beside_steps(self._request, apart, self.thread)
        name = f"verification of {type(request.model).__qualname__}"
        try:
            with apart.events.trace_unit(None, name):
                difference = trace_difference(request, self._plan)
        finally:
            self._records.counters["dynamo_traces"] += apart.counters["dynamo_traces"]
        return difference or "", round(time.perf_counter() - began, 3)


def stale(request: CompileRequest, difference: str) -> BundleStale:
    """The error of a start that may use nothing but its bundle."""
    return BundleStale(model=type(request.model).__qualname__, difference=difference)
