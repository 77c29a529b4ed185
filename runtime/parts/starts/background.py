"""Compile a model in a thread while this process serves it uncompiled.

The thread traces; clean worker processes generate the code (`compile.backends.workers`). The model
switches to compiled code between two steps. With several ranks all switch at the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ....compile.bundle.bundle import broken_condition
from ....compile.ir.compilation import BundleMiss, CompileRequest
from ....compile.pipeline import compile_missing, without_bundle
from ....compile.plan.compiled_model import CompiledModel
from ....compile.warm import Loaded, NoBundle
from ....errors import ModelMismatch
from ...core.exchange import Exchange
from ...core.records import BackgroundFailure, BackgroundPhase, LibrariesBuilt, Records
from .tracing_thread import NotKnown, TracingThread, beside_steps, reason_of

Look = Callable[[CompiledModel], object]
"""What a thread does beside steps for code that will serve, and keeps in the cache."""


class Background:
    """The compilation of one model beside its steps, in `thread`.

    There `look` finds what the switch needs to know of the compiled code.
    """

    def __init__(
        self,
        missing: NoBundle,
        records: Records,
        exchange: Exchange | None,
        look: Look,
    ) -> None:
        self._missing = missing
        self._records = records
        self._look = look
        self._began = time.perf_counter()
        forked = BundleMiss("a process that was forked has no threads")
        self._compiled: CompiledModel | BundleMiss = forked
        self._phase = ""
        self.thread = TracingThread(
            "piecegraph-background",
            self._compile,
            reason_of,
            exchange,
            0.0,
            missing.request.state,
        )
        self._note("started")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def compiled(self) -> CompiledModel | None:
        """The compiled model, when the thread is over; None if it stays uncompiled, on all ranks.

        With several ranks all must make the same call.
        """
        failure = self.thread.failure
        if not failure:
            local = self._compiled
            if isinstance(local, CompiledModel):
                try:
                    local = local.rebound()  # weights may have been replaced since
                except ModelMismatch as error:
                    local = BundleMiss(str(error))
            if isinstance(agreed := self._missing.agree(local), Loaded):
                return agreed.compiled
            failure = str(agreed)
        self._records.add(BackgroundFailure(failure))
        return None

    def _compile(self) -> str:
        """In the thread: what is compiled serves, whether or not the cache could keep it.

        Its records are apart: those of the start stay as they are, but for why the next start does
        not find the code.
        """
        from ....compile.verify import trace_difference

        apart = Records(self._records.events.parent)
        apart.events.phase_listeners.append(self._note)
        request = beside_steps(self._missing.request, apart, self.thread)
        request = replace(request, progress=self._note)
        # of the state of `prepare`, and of the model as it is now
        self._missing = replace(self._missing, key=without_bundle(request).key)
        try:
            compiled = compile_missing(replace(self._missing, request=request))
            changed: str | None = broken_condition(compiled.conditions, request.model)
            if not changed and apart.compile.not_cacheable:
                changed = trace_difference(request, compiled.plan)  # what has no condition, too
        finally:
            for name in ("dynamo_traces", "inductor_compiles"):
                self._records.counters[name] += apart.counters[name]
            start = self._records.compile
            start.failed_writes += apart.compile.failed_writes
            start.not_cacheable += apart.compile.not_cacheable
        if changed:
            return f"the model was changed meanwhile: {changed}"
        if compiled.bundle and not self._missing.finds(compiled):
            raise NotKnown("its bundle was stored under the key of another state")
        self._look(compiled)
        self._compiled = compiled
        return ""

    def _note(self, phase: str) -> None:
        """Record a phase once, though waiting for another process repeats it."""
        if self._phase != phase:
            self._phase = phase
            self._records.add(BackgroundPhase(phase, round(self.seconds, 3)))


class Libraries:
    """Builds libraries for the next start, in `thread`, while compiled code serves."""

    def __init__(self, request: CompileRequest, records: Records) -> None:
        self._request = request
        self._records = records
        self._began = time.perf_counter()
        self.thread = TracingThread(
            "piecegraph-libraries", self._build, self._failed, state=request.state
        )

    def _build(self) -> str:
        from ....compile.ahead import compile_ahead

        apart = Records(self._records.events.parent)
        compile_ahead(beside_steps(self._request, apart, self.thread))
        return self._over(apart.compile.not_stored())

    def _failed(self, error: Exception) -> str:
        return self._over(reason_of(error))

    def _over(self, reason: str) -> str:
        """Compiled code goes on serving, whatever the reason."""
        seconds = round(time.perf_counter() - self._began, 3)
        self._records.add(LibrariesBuilt(seconds, reason or None))
        return ""
