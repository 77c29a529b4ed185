"""Captures and frees single graphs of a plan, within the memory limit, alike on all ranks.

What the limit admits follows from a forecast that probes make and captures correct. Outcomes of
captures are exchanged by ranks before any of them uses a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

from ...dispatch import Dispatcher
from ...errors import CaptureFailed, DummyStepFailed
from ..after_seal import allow_compilation
from ..backends.protocol import GraphBackend
from ..config import Config
from ..ranks import Exchange, worst_outcome
from ..records import CaptureRecord, Records
from .admitted import CaptureCosts
from .capture_log import CaptureLog
from .graph_memory import GraphMemory, graph_of, limit_in_bytes
from .recording import Recording
from .session import CaptureSession, capture_session
from .wanted import CaptureQueue


class Graphs(Protocol):
    """Makes and holds graphs: `CapturedGraphs`, or a substitute where graphs are modeled."""

    def record(self, graph_index: int, session: CaptureSession) -> Recording: ...
    def install(self, graph_index: int, recording: Recording) -> None: ...
    def remove(self, graph_index: int) -> None: ...


class LimitedCaptures:
    """The captures of one prepared model, one at a time; `Capturer` decides which and when.

    `counts` gives how many steps of 0, 1, … tokens were run so far, up to a size.
    """

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        backend: GraphBackend,
        records: Records,
        graphs: Graphs,
        exchange: Exchange,
        counts: Callable[[int], Sequence[int]] = lambda largest: (),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._entries = dispatcher.plan.entries
        self._backend = backend
        self._records = records
        self._events = records.events
        self._graphs = graphs
        self._exchange = exchange
        self._counts = counts
        self._clock = clock
        self._changes = 0
        self._pool: Any = None
        self.begin()

    def begin(self) -> None:
        """Start over: no graph is captured."""
        self.memory = GraphMemory()
        self.queue = CaptureQueue(self._config.strategy, self._dispatcher.plan)
        self._drop(())
        self._costs = CaptureCosts()
        self._log = CaptureLog(self._records, self._dispatcher, self.queue)
        self._pruned: list[int] = []
        self._over_limit = False
        if self._pool is not None:
            self._backend.release_pool(self._pool)
            self._pool = None

    def _changed(self) -> None:
        """A graph was captured or freed."""
        self._changes += 1
        self.queue.changed()

    def _capture(self, graph_index: int, session: CaptureSession, *, serving: bool = True) -> bool:
        """Capture one graph on all ranks or on none; returns whether it was captured.

        Raises DummyStepFailed at startup; in `serving`, steps continue without the graph.
        """
        entry, state = self._entries[graph_index], self.queue.states[graph_index]
        began = self._clock()
        recording, reason = None, ""
        handled = (CaptureFailed, DummyStepFailed) if serving else (CaptureFailed,)
        try:
            recording = self._graphs.record(graph_index, session)
        except handled as error:
            reason = str(error)
        ms = (self._clock() - began) * 1000
        num_bytes = recording.bytes if recording else 0
        topic = f"capture of graph {graph_index} at step {self.queue.step}"
        ms, num_bytes, reason = worst_outcome(self._exchange, topic, ms, num_bytes, reason)
        self._costs.measured(entry.mode, entry.descriptor.num_tokens, ms)
        if recording is None or reason:
            if recording:
                recording.release()
            self.queue.failed(graph_index)
            self._log.failed(graph_index, reason)
            return False
        self._graphs.install(graph_index, recording)
        self._changed()
        state.captured, state.bytes, state.launches = True, num_bytes, recording.operations
        self.memory.took(graph_of(self._dispatcher.plan, graph_index), num_bytes)
        self._log.captured(graph_index, ms, num_bytes, recording)
        if self.memory.exceeded:
            self._give_up(graph_index, num_bytes)
        return state.captured

    def _give_up(self, graph_index: int, num_bytes: int) -> None:
        """Free a graph with which the limit is exceeded; it is not tried again."""
        limit = self.memory.limit
        self._evict(graph_index)
        self.queue.states[graph_index].dropped = True
        self._log.refused(
            graph_index, f"it took {num_bytes} bytes and exceeded the limit of {limit}"
        )
        self._over_limit = self.memory.exceeded

    def _make_room(self) -> bool:
        """Drop captured graphs that keep most of the plan out; returns whether there are any."""
        for graph_index in self.memory.too_large(self._dispatcher.plan, self.queue.states):
            self._evict(graph_index)
            self.queue.states[graph_index].dropped = self._over_limit = True
        return self._over_limit

    def _return_to_limit(self) -> None:
        """Capture the graphs again in a new pool, if the pool stayed too large for the limit.

        A pool keeps the memory that its largest graph needed as long as it has any graph. Each
        round drops at least one graph.
        """
        lost: dict[int, bool] = {}
        while self._over_limit:
            self._over_limit = False
            lost |= {i: state.kept for i, state in enumerate(self.queue.states) if state.captured}
            for graph_index in lost:
                if self.queue.states[graph_index].captured:
                    self._evict(graph_index)
            self._backend.release_pool(self._pool)
            self._pool = None
            self.memory.pool_freed()
            with self._session(prepare=True) as session:
                for graph_index, kept in sorted(lost.items()):
                    state = self.queue.states[graph_index]
                    if not state.dropped and not self._over_limit:
                        state.kept = self._capture(graph_index, session) and kept

    def _use_room(self, progress: Callable[[CaptureRecord], None] | None) -> None:
        """Capture graphs that were pruned, if the corrected forecast says that they fit."""
        for graph_index in reversed(self._pruned):
            state = self.queue.states[graph_index]
            if self.memory.admits(graph_of(self._dispatcher.plan, graph_index)):
                with self._session(prepare=False) as session:
                    state.dropped = False
                    state.kept = self._capture(graph_index, session)
                if state.kept and progress is not None:
                    progress(self._records.of(CaptureRecord)[-1])
                self._return_to_limit()

    def _within_limit(self, graph_index: int) -> bool:
        if self.memory.admits(graph_of(self._dispatcher.plan, graph_index)):
            return True
        self._log.refused(
            graph_index, f"it would pass the memory limit of {self.memory.limit} bytes"
        )
        self.queue.block(graph_index)
        return False

    def _evict(self, graph_index: int) -> None:
        state, before = self.queue.states[graph_index], self._backend.memory().used
        self._graphs.remove(graph_index)
        freed = before - self._backend.memory().used
        answers = self._exchange(f"eviction of graph {graph_index}", {"freed": freed})
        freed = min(answer["freed"] for answer in answers)
        self.memory.freed(graph_of(self._dispatcher.plan, graph_index), freed)
        self._log.evicted(graph_index, freed)
        state.captured, state.bytes = False, 0
        self._changed()

    def expected_bytes(self) -> tuple[int, int]:
        """Bytes of all graphs, captured or still to be, and by how much that may be wrong."""
        if self._entries and self.queue.untouched:
            self._forget_failed_probes()
            if self.memory.forecast is None:
                self._plan_memory()
        if self.memory.forecast is None or self.queue.complete:
            return self.memory.used, 0
        indices = [i for i, state in enumerate(self.queue.states) if not state.dropped]
        return self.memory.expected(self._dispatcher.plan, indices)

    def _forget_failed_probes(self) -> None:
        """Probe again if a probe failed: its dummy batch may have lacked metadata."""
        if self.memory.impossible:
            self.memory = GraphMemory()
            self._drop(())

    def _apply_memory_limit(self) -> None:
        if self.queue.untouched:
            self._forget_failed_probes()
            if self._config.memory_limit is not None:
                self._plan_memory()

    def _plan_memory(self) -> None:
        """Forecast what graphs take, unless that is known, and drop those above the limit."""
        if self.memory.forecast is None:
            with allow_compilation(), self._events.span("forecast", level=logging.INFO):
                list(self._probing())
        self._plan_limit()

    def _probing(self, serving: bool = False) -> Iterator[float]:
        plan, record, events = self._dispatcher.plan, self._graphs.record, self._events
        of_graphs = plan, self._backend, record, self._exchange, events
        return self.memory.probe(*of_graphs, serving=serving)

    def _plan_limit(self) -> None:
        """Drop graphs above the limit, by what is forecast."""
        plan = self._dispatcher.plan
        limit = limit_in_bytes(self._config.memory_limit, self._backend.memory())
        dropped = self.memory.plan_limit(
            limit, plan, self._counts(plan.largest), self._exchange, self._records
        )
        self._drop(dropped)
        self._pruned = [i for i in dropped if i not in self.memory.impossible]

    def _drop(self, indices: Collection[int]) -> None:
        for graph_index, state in enumerate(self.queue.states):
            state.dropped = graph_index in indices

    @contextmanager
    def _session(self, *, prepare: bool) -> Iterator[CaptureSession]:
        if self._pool is None:
            self._pool = self._backend.new_pool()
        with (
            allow_compilation(),
            capture_session(self._backend, self._pool, self._events, prepare=prepare) as session,
        ):
            yield session
