"""Runs a capture strategy: at startup, between two steps, and in idle time.

The queue chooses what to capture; the capturer applies budgets and memory limits and keeps ranks
consistent. Every choice depends only on facts that all ranks share: the wanted graph, the step
number, and outcomes of captures, which ranks exchange before any of them uses a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

from ...dispatch import Batch, CaptureStrategy, Decision, Dispatcher, PlanEntry, RuntimeMode
from ...errors import CaptureFailed, DummyStepFailed
from ..backends.protocol import GraphBackend
from ..capture.recording import Recording
from ..capture.session import CaptureSession, capture_session
from ..config import Config
from ..memory.budget import Exchange, GraphMemory, graph_of, limit_in_bytes
from ..records import CaptureRecord, Records
from .capture_log import CaptureLog
from .limits import CaptureBudget, CaptureCosts, LazyBytes, StepBudgets
from .monitors import allow_compilation
from .queue import CaptureQueue
from .ranks import worst_outcome


class Graphs(Protocol):
    """Makes and holds graphs: `CapturedGraphs`, or a substitute where graphs are modeled."""

    def record(self, graph_index: int, session: CaptureSession) -> Recording: ...
    def install(self, graph_index: int, recording: Recording) -> None: ...
    def remove(self, graph_index: int) -> None: ...


class Capturer:
    """The captures of one prepared model. `active` says whether steps may capture.

    A step need not call `before_step` for a decision in `idle_steps`, see `CaptureQueue`.
    """

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        backend: GraphBackend,
        records: Records,
        graphs: Graphs,
        exchange: Exchange,
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
        self._clock = clock
        self._changes = 0
        self._pool: Any = None
        self._retired: frozenset[int] = frozenset()
        self.begin()

    def begin(self) -> None:
        """Start over: no graph is captured."""
        strategy, plan = self._config.strategy, self._dispatcher.plan
        self.active = False
        self.memory = GraphMemory()
        self.queue = CaptureQueue(strategy, plan, self._config.min_hits)
        self._drop(())
        self._costs = CaptureCosts()
        lazy_limit = self._config.lazy_bytes if strategy is CaptureStrategy.LAZY else None
        self._lazy = LazyBytes(lazy_limit, self.queue.states, self._entries)
        self._budgets = StepBudgets(
            self._config.captures_per_step, self._config.capture_ms_per_step
        )
        self._log = CaptureLog(self._records, self._dispatcher, self.queue)
        self._pruned: list[int] = []
        self._over_limit = False
        self.idle_steps = self.queue.idle_steps
        if self._pool is not None:
            self._backend.release_pool(self._pool)
            self._pool = None

    def startup(
        self,
        progress: Callable[[CaptureRecord], None] | None = None,
        *,
        serving: bool = False,
    ) -> None:
        """Capture what the strategy wants at startup; `progress` is called per capture.

        In `serving`, between two steps, a dummy batch that fails is no error.
        """
        self._apply_memory_limit()
        self._capture_startup_set(progress, serving)
        eager = self._config.strategy is CaptureStrategy.EAGER
        while self._over_limit or (eager and self._make_room()):
            self._return_to_limit()
            self._capture_startup_set(progress, serving)
        if eager:
            self._use_room(progress)
        self._refresh_active()
        if self.memory.forecast is not None:
            captured = [i for i, state in enumerate(self.queue.states) if state.captured]
            self._records.add(self.memory.accuracy(self._dispatcher.plan, captured))

    def startup_while_serving(self) -> None:
        """Capture the startup set between the next steps, within the budget of each."""
        self._apply_memory_limit()
        states = self.queue.states
        firsts = (next((i for i in g if not states[i].dropped), None) for g in self.queue.startup())
        self.queue.add(i for i in firsts if i is not None)
        self._refresh_active()

    def _apply_memory_limit(self) -> None:
        if self.queue.untouched:
            self._forget_failed_probes()
            if self._config.memory_limit is not None:
                self._plan_memory()

    def _capture_startup_set(
        self, progress: Callable[[CaptureRecord], None] | None, serving: bool
    ) -> None:
        with self._session(prepare=True) as session:
            for group in self.queue.startup():
                for graph_index in group:
                    state = self.queue.states[graph_index]
                    if not state.captured and not state.dropped and self._within_limit(graph_index):
                        state.kept = self._capture(graph_index, session, serving=serving)
                        if state.kept and progress is not None:
                            progress(self._records.of(CaptureRecord)[-1])
                    if self._over_limit:
                        return
                    if state.captured:
                        break

    def before_step(
        self,
        batch: Batch,
        decision: Decision | None = None,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> bool:
        """Capture what the strategy wants before `batch` runs, within the budget of one step.

        Returns whether graphs changed, so that `decision` no longer holds.
        """
        wanted = self._dispatcher.wanted(batch, allowed_modes, excluded_modes).graph_index
        self.queue.see(wanted)
        changes = self._changes
        self._spend(self._budgets.next_step(), self.queue.between_steps(wanted))
        if self._changes != changes:
            return True
        if decision is not None and self.queue.nothing_to_capture(wanted):
            self.queue.add_idle(decision, wanted, batch.num_reqs)
        return False

    def idle(self, budget_ms: float) -> int:
        """Capture for at most `budget_ms` milliseconds, by estimate; returns how many graphs."""
        if not self.active:
            return 0
        self.queue.count_idle()
        budget = CaptureBudget(len(self._entries), budget_ms)
        return self._spend(budget, self.queue.in_idle_time())

    def change_plan(self, entries: Set[PlanEntry]) -> None:
        """Make `entries` the graphs of the plan: others are freed, missing ones are captured
        between the next steps, within the budgets."""
        known = {entry: index for index, entry in enumerate(self._entries)}
        new = sorted(entries - known.keys(), key=lambda entry: -entry.descriptor.num_tokens)
        retired = frozenset(index for entry, index in known.items() if entry not in entries)
        revived = sorted(self._retired - retired)
        for graph_index in sorted(retired):
            if self.queue.states[graph_index].captured:
                self._evict(graph_index)
        self._retired = retired
        added = [*revived, *range(len(known), len(known) + len(new))]
        self._dispatcher.change_plan(new, retired)
        self._entries = self._lazy.entries = self._dispatcher.plan.entries
        self.queue.change_plan(self._dispatcher.plan, added)
        for graph_index in retired:
            self.queue.states[graph_index].dropped = True
        self._changed()
        self._refresh_active()

    def _changed(self) -> None:
        """A graph was captured or freed."""
        self._changes += 1
        self.queue.changed()

    def recapture(self, indices: Collection[int]) -> None:
        """Free stale graphs, all of them before the first is captured again."""
        if not indices:
            return
        for graph_index in indices:
            self._evict(graph_index)
        with self._session(prepare=True) as session:
            for graph_index in indices:
                self._capture(graph_index, session)
        self._return_to_limit()
        self._refresh_active()

    def _spend(self, budget: CaptureBudget, indices: Iterator[int]) -> int:
        """Capture those of `indices`, in order, that fit the budget and the memory."""
        chosen = self._choose(budget, indices)
        graph_index = next(chosen, None)
        if graph_index is None:
            return 0
        made = 0
        with self._session(prepare=False) as session:
            while graph_index is not None:
                if self._capture(graph_index, session):
                    self._lazy.took(graph_index, self._evict)
                    made += self.queue.states[graph_index].captured
                budget.spend(self._estimate(graph_index))  # as just measured, on all ranks
                graph_index = None if self._over_limit else next(chosen, None)
        self._return_to_limit()
        self._refresh_active()
        return made

    def _choose(self, budget: CaptureBudget, indices: Iterator[int]) -> Iterator[int]:
        for graph_index in indices:
            if budget.captures <= 0:
                return
            estimate = self._estimate(graph_index)
            if estimate > budget.ms:
                self._budgets.wait_for(estimate, self._events)
                reason = f"it takes about {estimate:.1f} ms, more than the budget has"
                self._log.refused(graph_index, reason)
                return
            if self._within_limit(graph_index) and self._within_lazy_limit(graph_index):
                yield graph_index

    def _estimate(self, graph_index: int) -> float:
        entry = self._entries[graph_index]
        return self._costs.estimate(entry.mode, entry.descriptor.num_tokens)

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

    def _within_lazy_limit(self, graph_index: int) -> bool:
        if self._lazy.limit is not None:
            self.queue.count_idle()
        if self._lazy.make_room(graph_index, self._evict):
            return True
        limit = self._lazy.limit
        self._log.refused(
            graph_index, f"lazy recordings may take {limit} bytes, and none is worth less"
        )
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

    def _refresh_active(self) -> None:
        """Steps capture as long as something can still be captured."""
        was = self.active
        lazily = self._config.strategy is not CaptureStrategy.EAGER
        self.active = self.queue.adding or (lazily and not self.queue.complete)
        if was and not self.active:
            self._events.emit("capture.complete", level=logging.INFO, step=self.queue.step)

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

    def _plan_memory(self) -> None:
        """Forecast what graphs take, unless that is known, and drop those above the limit."""
        plan, traffic = self._dispatcher.plan, self._dispatcher.histogram
        exchange, records = self._exchange, self._records
        limit = limit_in_bytes(self._config.memory_limit, self._backend.memory())
        if self.memory.forecast is None:
            with allow_compilation():
                self.memory.probe(
                    plan, self._backend, self._graphs.record, exchange, records.events
                )
        dropped = self.memory.plan_limit(limit, plan, traffic, exchange, records)
        self._drop(dropped)
        self._pruned = [i for i in dropped if i not in self.memory.impossible]

    def _drop(self, indices: Collection[int]) -> None:
        for graph_index, state in enumerate(self.queue.states):
            state.dropped = graph_index in indices or graph_index in self._retired

    @contextmanager
    def _session(self, *, prepare: bool) -> Iterator[CaptureSession]:
        if self._pool is None:
            self._pool = self._backend.new_pool()
        with (
            allow_compilation(),
            capture_session(self._backend, self._pool, self._events, prepare=prepare) as session,
        ):
            yield session
