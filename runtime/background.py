"""Compile a model in a thread while this process serves it uncompiled.

The thread traces; clean worker processes generate the code (`compile.backends.workers`). The model
switches to compiled code between two steps. With several ranks all switch at the same step.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from ..compile.ir.compilation import BundleMiss, CompileRecords
from ..compile.pipeline import compile_missing, without_bundle
from ..compile.plan.compiled_model import CompiledModel
from ..compile.warm import Loaded, NoBundle
from ..errors import ModelMismatch
from ..events import Event
from .ranks import Exchange
from .records import BackgroundFailure, BackgroundPhase, Records
from .tracing_thread import TracingThread

STEPS_PER_EXCHANGE = 16
"""How often several ranks compare whether all are ready."""

ATTEMPTS = 3


class Background:
    """The compilation of one model beside its steps."""

    def __init__(self, missing: NoBundle, records: Records, exchange: Exchange | None) -> None:
        """Start. `exchange` compares what ranks state, if there are several."""
        self.steps = 0
        self.between_steps = threading.RLock()
        """Held while a step runs, and while the model switches."""
        self.over = False
        """Whether the model stays uncompiled, on all ranks."""
        self._missing = missing
        self._records = records
        self._exchange = exchange
        self._began = time.perf_counter()
        self._outcome: Loaded | str = ""
        """The model, or why it could not be compiled."""
        self._expired = False
        self._phase = ""
        self._faults: list[str] = []
        """Why the code could not be stored."""
        self._thread = TracingThread("piecegraph-background", self._compile)
        self._note("started")
        self._thread.start()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def poll(self) -> CompiledModel | None:
        """The compiled model, once all ranks have it; to be called once before each step.

        `between_steps` is held.
        """
        self.steps += 1
        if self._exchange is not None and self.steps % STEPS_PER_EXCHANGE:
            return None
        return self._ready(expired=False)

    def wait(self, timeout_s: float | None) -> CompiledModel | None:
        """Wait for the compiled model; None if it stays uncompiled or the time has passed.

        With several ranks all must make the same call.
        """
        end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._thread.join(max(0.0, min(1.0, end - time.monotonic())))
            with self.between_steps:
                compiled = self._ready(expired=time.monotonic() >= end)
            if compiled is not None or self.over or self._expired:
                return compiled

    def stop(self) -> None:
        """End the compilation. Idempotent."""
        self._thread.stop()

    def _ready(self, expired: bool) -> CompiledModel | None:
        failure, compiled = "", None
        if isinstance(self._outcome, Loaded):
            try:
                compiled = self._outcome.compiled.rebound()  # weights may have been replaced since
            except ModelMismatch as error:
                failure = str(error)
        elif self._thread.join(0):
            failure = "; ".join(dict.fromkeys(self._faults)) or self._outcome
            failure = failure or "the model was closed"
        ready = compiled is not None
        if self._exchange is not None:
            own = {"ready": ready, "failure": failure, "expired": expired}
            stated = self._exchange("switch to compiled code", own)
            failures = [f"rank {i}: {o['failure']}" for i, o in enumerate(stated) if o["failure"]]
            failure = "; ".join(failures)
            ready = all(other["ready"] for other in stated)
            expired = any(other["expired"] for other in stated)
        self._expired = expired
        if ready:
            assert isinstance(self._outcome, Loaded)
            agreed = self._missing.agree(self._outcome)
            failure = str(agreed) if isinstance(agreed, BundleMiss) else ""
        if failure:
            self.over = True
            if not self._thread.stopped:
                self._records.add(BackgroundFailure(failure))
        return compiled if ready and not failure else None

    def _compile(self) -> None:
        """In the thread. Its records are apart: those of the start stay as they are."""
        apart = Records(self._records.events.parent)
        apart.events.phase_listeners.append(self._note)
        for events in (apart.events, self._records.events):  # a cache emits those of the start
            events.listeners.append(self._tell)
        request = replace(
            self._missing.request,
            records=CompileRecords(),
            events=apart.events,
            serving=True,
            checkpoint=self._thread.checkpoint,
        )
        for _ in range(ATTEMPTS):  # a model that is changed meanwhile is compiled again
            try:
                compile_missing(replace(self._missing, request=request))
                outcome = self._missing.load()
            except Exception as error:
                self._outcome = f"{type(error).__name__}: {error}"
                break
            self._outcome = outcome if isinstance(outcome, Loaded) else str(outcome)
            if isinstance(outcome, Loaded) or self._faults:
                break
            self._missing = without_bundle(self._missing.request)
        self._records.events.listeners.remove(self._tell)
        for name in ("dynamo_traces", "inductor_compiles"):
            self._records.counters[name] += apart.counters[name]

    def _note(self, phase: str) -> None:
        """Record a phase once, though waiting for another process repeats it."""
        if self._phase != phase:
            self._phase = phase
            self._records.add(BackgroundPhase(phase, round(self.seconds, 3)))

    def _tell(self, event: Event) -> None:
        if event.name == "compile.end":
            self._note(f"compiled piece {event.facts['piece']}")
        elif event.name == "cache.wait":
            self._thread.checkpoint()
            self._note("another process compiles it")
        elif event.name in ("bundle.not_kept", "cache.publish_failed"):
            self._faults.append(f"its code cannot be stored: {event.facts['reason']}")
