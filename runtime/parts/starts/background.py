"""Compile a model in a thread while this process serves it uncompiled.

The thread traces; clean worker processes generate the code (`compile.backends.workers`). The model
switches to compiled code between two steps. With several ranks all switch at the same step.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ....compile.ir.compilation import BundleMiss, CompileRequest
from ....compile.pipeline import compile_missing, without_bundle
from ....compile.plan.compiled_model import CompiledModel
from ....compile.warm import Loaded, NoBundle
from ....errors import ModelMismatch
from ....events import Event
from ...core.records import BackgroundFailure, BackgroundPhase, LibrariesBuilt, Records
from ..ranks.ranks import Exchange
from .tracing_thread import TracingThread, beside_steps

ATTEMPTS = 3
FAULTS = ("compile.library_failed", "bundle.not_kept", "cache.publish_failed")
"""Events that say why there are no libraries."""


class Background:
    """The compilation of one model beside its steps, in `thread`."""

    def __init__(self, missing: NoBundle, records: Records, exchange: Exchange | None) -> None:
        self._missing = missing
        self._records = records
        self._began = time.perf_counter()
        self._loaded: Loaded | None = None
        self._phase = ""
        self._faults: list[str] = []
        """Why the code could not be stored."""
        self.thread = TracingThread("piecegraph-background", self._compile, self._failed, exchange)
        self._note("started")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def compiled(self) -> CompiledModel | None:
        """The compiled model, when the thread is over; None if it stays uncompiled, on all ranks.

        With several ranks all must make the same call.
        """
        failure, compiled = self.thread.failure, None
        if not failure:
            assert self._loaded is not None
            local: Loaded | BundleMiss = self._loaded
            try:
                compiled = self._loaded.compiled.rebound()  # weights may have been replaced since
            except ModelMismatch as error:
                local = BundleMiss(str(error))
            if isinstance(agreed := self._missing.agree(local), BundleMiss):
                failure = str(agreed)
        if failure:
            self._records.add(BackgroundFailure(failure))
            return None
        return compiled

    def _compile(self) -> str:
        """In the thread. Its records are apart: those of the start stay as they are."""
        apart = Records(self._records.events.parent)
        apart.events.phase_listeners.append(self._note)
        for events in (apart.events, self._records.events):  # a cache emits those of the start
            events.listeners.append(self._tell)
        request = beside_steps(self._missing.request, apart, self.thread)
        try:
            for _ in range(ATTEMPTS):  # a model that is changed meanwhile is compiled again
                compile_missing(replace(self._missing, request=request))
                outcome = self._missing.load()
                if isinstance(outcome, Loaded):
                    self._loaded = outcome
                    return ""
                failure = str(outcome)
                if self._faults:
                    break
                self._missing = without_bundle(self._missing.request)
        finally:
            self._records.events.listeners.remove(self._tell)
            for name in ("dynamo_traces", "inductor_compiles"):
                self._records.counters[name] += apart.counters[name]
        return self._failure(failure)

    def _failed(self, error: Exception) -> str:
        return self._failure(f"{type(error).__name__}: {error}")

    def _failure(self, failure: str) -> str:
        return "; ".join(dict.fromkeys(self._faults)) or failure

    def _note(self, phase: str) -> None:
        """Record a phase once, though waiting for another process repeats it."""
        if self._phase != phase:
            self._phase = phase
            self._records.add(BackgroundPhase(phase, round(self.seconds, 3)))

    def _tell(self, event: Event) -> None:
        if event.name == "compile.end":
            self._note(f"compiled piece {event.facts['piece']}")
        elif event.name == "cache.wait":
            self.thread.checkpoint()
            self._note("another process compiles it")
        elif event.name in ("bundle.not_kept", "cache.publish_failed"):
            self._faults.append(f"its code cannot be stored: {event.facts['reason']}")


class Libraries:
    """Builds libraries for the next start, in `thread`, while compiled code serves."""

    def __init__(self, request: CompileRequest, records: Records) -> None:
        self._request = request
        self._records = records
        self._began = time.perf_counter()
        self.thread = TracingThread("piecegraph-libraries", self._build, self._failed)

    def _build(self) -> str:
        from ....compile.ahead import compile_ahead

        apart = Records(self._records.events.parent)
        compile_ahead(beside_steps(self._request, apart, self.thread))
        both = (apart.events, self._records.events)  # a cache emits those of the start
        found = [event for events in both for name in FAULTS for event in events.named(name)]
        return self._over("; ".join(dict.fromkeys(event.facts["reason"] for event in found)))

    def _failed(self, error: Exception) -> str:
        return self._over(f"{type(error).__name__}: {error}")

    def _over(self, reason: str) -> str:
        """Compiled code goes on serving, whatever the reason."""
        seconds = round(time.perf_counter() - self._began, 3)
        self._records.add(LibrariesBuilt(seconds, reason or None))
        return ""
