"""Captures and frees single graphs of a plan, alike on all ranks.

Outcomes of captures are exchanged by ranks before any of them uses a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

from ...dispatch import DispatchPlan
from ...errors import CaptureFailed, CaptureOutOfMemory, DummyStepFailed
from ..backends.protocol import GraphBackend
from ..core.records import CaptureFailure, CaptureRecord, Records
from ..parts.ranks.ranks import Exchange, worst_outcome
from ..parts.seal.monitor import allow_compilation
from ..parts.strategies.admitted import CaptureCosts
from ..parts.strategies.graph_memory import GraphMemory
from ..parts.strategies.wanted import CaptureQueue
from .recording import Recording
from .session import CaptureSession, capture_session


class GraphMaker(Protocol):
    """Makes and holds graphs: `GraphSet`, or a substitute where graphs are modeled."""

    def record(self, graph_index: int, session: CaptureSession) -> Recording: ...
    def install(self, graph_index: int, recording: Recording) -> None: ...
    def remove(self, graph_index: int) -> None: ...


class Captures:
    """One capture or eviction at a time, in one pool; updates `queue`, `memory` and `costs`.

    `changes` counts graphs that were captured or freed.
    """

    def __init__(
        self,
        plan: DispatchPlan,
        backend: GraphBackend,
        records: Records,
        graphs: GraphMaker,
        exchange: Exchange,
        queue: CaptureQueue,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.queue = queue
        self.memory = GraphMemory(plan)
        self.costs = CaptureCosts()
        self.changes = 0
        self.clock = clock
        self.plan = plan
        self.backend = backend
        self.records = records
        self.graphs = graphs
        self.exchange = exchange
        self._pool: Any = None
        self._refused: set[int] = set()

    def capture(self, graph_index: int, session: CaptureSession, *, serving: bool = True) -> bool:
        """Capture one graph on all ranks or on none; returns whether it was captured.

        Raises DummyStepFailed at startup; in `serving`, steps continue without the graph.
        """
        entry, state = self.plan.entries[graph_index], self.queue.states[graph_index]
        self.backend.wait()
        began = self.clock()
        recording, reason, exhausted = None, "", False
        handled = (CaptureFailed, DummyStepFailed) if serving else (CaptureFailed,)
        try:
            recording = self.graphs.record(graph_index, session)
        except handled as error:
            reason, exhausted = str(error), isinstance(error, CaptureOutOfMemory)
            self.records.code_failed(error)
        self.backend.wait()  # its warm-up run keeps steps waiting, too
        if exhausted:
            session.recover()
        ms = (self.clock() - began) * 1000
        num_bytes = recording.bytes if recording else 0
        topic = f"capture of graph {graph_index} at step {self.queue.step}"
        ms, num_bytes, reason = worst_outcome(self.exchange, topic, ms, num_bytes, reason)
        self.costs.measured(entry.mode, entry.descriptor.num_tokens, ms)
        if recording is None or reason:
            if recording:
                recording.release()
            self.queue.failed(graph_index)
            retry_at = None if state.dropped else state.retry_at
            facts = self._facts(graph_index)
            self.records.add(CaptureFailure(**facts, reason=reason, retry_at_step=retry_at))
            return False
        self.graphs.install(graph_index, recording)
        self._changed()
        state.captured, state.bytes, state.launches = True, num_bytes, recording.operations
        self.memory.took(graph_index, num_bytes)
        self._refused.discard(graph_index)
        self.records.add(
            CaptureRecord(
                **self._facts(graph_index),
                ms=ms,
                bytes=num_bytes,
                allocated=recording.allocated,
                segments=len(recording.segments),
                topologies=[g.topology for g in recording.graphs if g.topology and g.operations],
                descriptor=entry.descriptor.as_json(),
            )
        )
        return True

    def evict(self, graph_index: int) -> None:
        """Free a captured graph."""
        state, before = self.queue.states[graph_index], self.backend.memory()
        self.graphs.remove(graph_index)
        freed = before.growth(self.backend.memory())
        answers = self.exchange(f"eviction of graph {graph_index}", {"freed": freed})
        freed = min(answer["freed"] for answer in answers)
        self.memory.freed(graph_index, freed)
        self.records.events.emit("capture.evicted", **self._facts(graph_index), freed=freed)
        state.captured, state.bytes = False, 0
        self._changed()

    def refused(self, graph_index: int, reason: str) -> None:
        """State once why a graph is not captured, and again after it was."""
        if graph_index not in self._refused:
            self._refused.add(graph_index)
            self.records.events.emit(
                "capture.refused", level=logging.INFO, **self._facts(graph_index), reason=reason
            )

    def estimate(self, graph_index: int) -> float:
        """Milliseconds that a capture is expected to take."""
        entry = self.plan.entries[graph_index]
        return self.costs.estimate(entry.mode, entry.descriptor.num_tokens)

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
        self.memory.pool_freed()

    def _changed(self) -> None:
        self.changes += 1
        self.queue.changed()

    def _facts(self, graph_index: int) -> dict[str, Any]:
        """The fields of a GraphRecord."""
        entry = self.plan.entries[graph_index]
        return {
            "mode": entry.mode.name,
            "num_tokens": entry.descriptor.num_tokens,
            "graph_index": graph_index,
            "step": self.queue.step,
        }
