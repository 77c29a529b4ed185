"""Captures and frees single graphs of a plan, alike on all ranks.

Outcomes of captures are exchanged by ranks before any of them uses a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from ...compile.ir.locations import handled
from ...dispatch import DispatchPlan
from ...errors import CaptureFailed, CaptureOutOfMemory, DummyStepFailed
from ..backends.protocol import GraphBackend
from ..core.allowed_work import allow_compilation
from ..core.exchange import CaptureAgreement, Exchange, Outcome
from ..core.records import CaptureFailure, CaptureRecord, Records
from .recording import Recording
from .session import CaptureSession, capture_session


class GraphMaker(Protocol):
    """Makes and holds graphs: `GraphSet`, or a substitute where graphs are modeled."""

    def record(self, graph_index: int, session: CaptureSession) -> Recording: ...
    def install(self, graph_index: int, recording: Recording) -> None: ...
    def remove(self, graph_index: int) -> None: ...


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """One capture on all ranks: the longest time, the most bytes.

    `record` is of the graph that was captured; without one `reason` says why it failed.
    """

    ms: float
    bytes: int
    operations: int = 0
    reason: str = ""
    record: CaptureRecord | None = None


def record_on_all_ranks(
    record: Callable[[], Recording],
    session: CaptureSession,
    serving: bool,
    clock: Callable[[], float] = perf_counter,
) -> tuple[Recording | None, Outcome]:
    """Record a graph under the agreement of `session`: on all ranks or on none.

    In `serving`, a dummy batch that fails is a failed capture; else it raises, and other ranks
    learn of it first.
    """
    session.backend.wait()
    began, recording, reason = clock(), None, ""
    tried_again = (CaptureFailed, DummyStepFailed) if serving else (CaptureFailed,)
    try:
        recording = record()
    except Exception as error:
        reason = str(error)
        if not isinstance(error, tried_again):
            session.agreement.raised(reason)
            raise
        if isinstance(error, CaptureOutOfMemory):
            session.recover()
        handled(error)  # it goes no further
    session.backend.wait()  # its warm-up run keeps steps waiting, too
    num_bytes = recording.bytes if recording else 0
    outcome = session.agreement.outcome((clock() - began) * 1000, num_bytes, reason)
    if recording and outcome[2]:
        recording.release()
        recording = None
    return recording, outcome


class Captures:
    """One capture or eviction at a time, in one pool.

    `changes` counts graphs that were captured or freed, `step` the batches so far.
    """

    def __init__(
        self,
        plan: DispatchPlan,
        backend: GraphBackend,
        records: Records,
        graphs: GraphMaker,
        exchange: Exchange,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.changes = self.step = 0
        self.clock = clock
        self.plan = plan
        self.backend = backend
        self.records = records
        self.graphs = graphs
        self.exchange = exchange
        self._pool: Any = None

    def capture(
        self, graph_index: int, session: CaptureSession, *, serving: bool = True
    ) -> CaptureOutcome:
        """Capture one graph on all ranks or on none.

        A failure is for the caller to record, see `failed`. Raises DummyStepFailed at startup; in
        `serving`, steps continue without the graph.
        """
        session.agreement = CaptureAgreement(
            self.exchange, f"capture of graph {graph_index} at step {self.step}"
        )
        recording, (ms, num_bytes, reason) = record_on_all_ranks(
            partial(self.graphs.record, graph_index, session), session, serving, self.clock
        )
        if recording is None:
            return CaptureOutcome(ms, num_bytes, reason=reason)
        self.graphs.install(graph_index, recording)
        self.changes += 1
        record = CaptureRecord(
            **self.facts(graph_index),
            ms=ms,
            bytes=num_bytes,
            allocated=recording.allocated,
            segments=len(recording.segments),
            descriptor=self.plan.entries[graph_index].descriptor.as_json(),
        )
        self.records.add(record)
        return CaptureOutcome(ms, num_bytes, recording.operations, record=record)

    def failed(self, graph_index: int, outcome: CaptureOutcome, retry_at_step: int | None) -> None:
        """Record a failed capture, which is tried again at a step, or never."""
        facts = self.facts(graph_index)
        self.records.add(
            CaptureFailure(**facts, reason=outcome.reason, retry_at_step=retry_at_step)
        )

    def evict(self, graph_index: int) -> int:
        """Free a captured graph; returns the bytes that were freed on all ranks."""
        before = self.backend.memory()
        self.graphs.remove(graph_index)
        freed = before.growth(self.backend.memory())
        answers = self.exchange(f"eviction of graph {graph_index}", {"freed": freed})
        freed = int(min(answer["freed"] for answer in answers))
        self.records.events.emit("capture.evicted", **self.facts(graph_index), freed=freed)
        self.changes += 1
        return freed

    @contextmanager
    def session(self, *, prepare: bool) -> Iterator[CaptureSession]:
        """A session on the pool of the graphs."""
        if self._pool is None:
            self._pool = self.backend.new_pool()
        events = self.records.events
        with (
            allow_compilation(),
            capture_session(self.backend, self._pool, events, prepare=prepare) as session,
        ):
            yield session

    def release_pool(self) -> None:
        """Give back the memory of the pool, which has no graph any more."""
        if self._pool is not None:
            self.backend.release_pool(self._pool)
            self._pool = None

    def facts(self, graph_index: int) -> dict[str, Any]:
        """The fields of a GraphRecord."""
        entry = self.plan.entries[graph_index]
        return {
            "mode": entry.mode.name,
            "num_tokens": entry.descriptor.num_tokens,
            "graph_index": graph_index,
            "step": self.step,
        }
