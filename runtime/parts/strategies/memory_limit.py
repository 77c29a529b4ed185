"""Keeps captured graphs within `steps.memory_limit`.

What the limit admits follows from a forecast that probes make and captures correct.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from ...capture.session import CaptureSession
from ...core.allowed_work import allow_compilation
from ...core.records import CaptureRecord
from .counted import CountedCaptures
from .forecast import forecast_memory
from .graph_memory import GraphMemory


class MemoryLimit:
    """Captures within a `limit`: bytes, a share of free memory, or None.

    `counts` gives how many steps of 0, 1, … tokens were run so far, up to a size.
    """

    def __init__(
        self,
        limit: int | float | None,
        captures: CountedCaptures,
        counts: Callable[[int], Sequence[int]],
    ) -> None:
        self.is_set = limit is not None
        self.exceeded = False
        """Whether freeing a graph left a pool that is too large."""
        self._limit = limit
        self._captures = captures
        self._counts = counts
        self._plan = captures.captures.plan
        self._queue = captures.queue
        self._records = captures.captures.records
        self._pruned: list[int] = []

    @property
    def memory(self) -> GraphMemory:
        return self._captures.memory

    def admits(self, graph_index: int) -> bool:
        """Whether one more graph is expected to fit; else it is blocked and the reason recorded."""
        if self.memory.admits(graph_index):
            return True
        reason = f"it would pass the memory limit of {self.memory.limit} bytes"
        self._captures.refused(graph_index, reason)
        self._queue.block(graph_index)
        return False

    def capture(self, graph_index: int, session: CaptureSession, *, serving: bool = True) -> bool:
        """Capture a graph, and free it if it exceeds the limit; it is not tried again then."""
        captured = self._captures.capture(graph_index, session, serving=serving)
        if captured and self.memory.exceeded:
            state = self._queue.states[graph_index]
            num_bytes, limit = state.bytes, self.memory.limit
            self._captures.evict(graph_index)
            state.dropped = True
            reason = f"it took {num_bytes} bytes and exceeded the limit of {limit}"
            self._captures.refused(graph_index, reason)
            self.exceeded = self.memory.exceeded
            return False
        return captured

    def make_room(self) -> bool:
        """Drop captured graphs that keep most of the plan out; returns whether there are any."""
        for graph_index in self.memory.too_large(self._queue.states):
            self._captures.evict(graph_index)
            self._queue.states[graph_index].dropped = self.exceeded = True
        return self.exceeded

    def return_to_limit(self) -> None:
        """Capture the graphs again in a new pool, if the pool stayed too large for the limit.

        A pool keeps the memory that its largest graph needed as long as it has any graph. Each
        round drops at least one graph.
        """
        lost: dict[int, bool] = {}
        while self.exceeded:
            self.exceeded = False
            lost |= {i: state.kept for i, state in enumerate(self._queue.states) if state.captured}
            for graph_index in lost:
                if self._queue.states[graph_index].captured:
                    self._captures.evict(graph_index)
            self._captures.release_pool()
            with self._captures.captures.session(prepare=True) as session:
                for graph_index, kept in sorted(lost.items()):
                    state = self._queue.states[graph_index]
                    if not state.dropped and not self.exceeded:
                        state.kept = self.capture(graph_index, session) and kept

    def use_room(self, progress: Callable[[CaptureRecord], None] | None) -> None:
        """Capture graphs that were pruned, if the corrected forecast says that they fit."""
        for graph_index in reversed(self._pruned):
            state = self._queue.states[graph_index]
            if self.memory.admits(graph_index):
                with self._captures.captures.session(prepare=False) as session:
                    state.dropped = False
                    state.kept = self.capture(graph_index, session)
                if state.kept and progress is not None:
                    progress(self._records.of(CaptureRecord)[-1])
                self.return_to_limit()

    def expected_bytes(self) -> tuple[int, int]:
        """Bytes of all graphs, captured or still to be, and by how much that may be wrong."""
        if self._plan.entries and self._queue.untouched:
            self._forget_failed_probes()
            if self.memory.forecast is None:
                self._plan_graphs()
        if self.memory.forecast is None or self._queue.complete:
            return self.memory.used, 0
        indices = [i for i, state in enumerate(self._queue.states) if not state.dropped]
        return self.memory.expected(indices)

    def apply(self) -> None:
        """Before the startup set is captured: drop graphs above the limit, by a forecast."""
        if self._queue.untouched:
            self._forget_failed_probes()
            if self.is_set:
                self._plan_graphs()

    def probing(self, serving: bool = False) -> Iterator[float]:
        """Forecast what the graphs take, from a few captures; yields the milliseconds of each.

        In `serving` steps may run in between.
        """
        plan, captures, memory = self._plan, self._captures.captures, self.memory
        memory.forecast, failed = yield from forecast_memory(
            captures.backend,
            plan,
            captures.graphs.record,
            self._records.events,
            captures.exchange,
            serving,
        )
        memory.probed, memory.impossible = memory.forecast, set(failed)
        modes = [entry.mode for entry in plan.entries]
        memory.impossible |= {
            i for i, mode in enumerate(modes) if mode not in memory.forecast.modes
        }

    def drop_above(self) -> None:
        """Drop graphs above the limit, by what is forecast. A float is a share of free memory."""
        limit, captures = self._limit, self._captures.captures
        if isinstance(limit, float):
            limit = int(limit * captures.backend.memory().free)
        counts = self._counts(self._plan.largest)
        dropped = self.memory.plan_limit(limit, counts, captures.exchange, self._records)
        self._drop(dropped)
        self._pruned = [i for i in dropped if i not in self.memory.impossible]

    def _plan_graphs(self) -> None:
        if self.memory.forecast is None:
            with allow_compilation(), self._records.events.span("forecast", level=logging.INFO):
                list(self.probing())
        self.drop_above()

    def _forget_failed_probes(self) -> None:
        """Probe again if a probe failed: its dummy batch may have lacked metadata."""
        if self.memory.impossible:
            self._captures.memory = GraphMemory(self._plan)
            self._drop(())

    def _drop(self, indices: Collection[int]) -> None:
        for graph_index, state in enumerate(self._queue.states):
            state.dropped = graph_index in indices
