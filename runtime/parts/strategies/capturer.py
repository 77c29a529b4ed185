"""Runs a capture strategy: at startup, between two steps, and in idle time.

The queue chooses what to capture; the capturer applies the budgets. Every choice depends only on
facts that all ranks share: the wanted graph, the step number, and outcomes of captures.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ....config import Eager, Lazy, Strategy
from ....dispatch import Batch, CapturePhase, Decision, Dispatcher
from ....torch_compat.basics.settings import TorchState
from ...capture.capture_all import Progress
from ...capture.captures import Captures
from ...core.allowed_work import allow_compilation
from ...core.records import CaptureRecord, GraphsReturned, PhaseCaptured
from ...part import Modes
from .admitted import CaptureBudget, LazyBytes
from .counted import CountedCaptures
from .graph_memory import GraphMemory
from .memory_limit import MemoryLimit
from .wanted import CaptureQueue, GraphState


class StrategyCapturer:
    """The captures of one prepared model. `active` says whether steps may capture.

    A step need not call `before_step` for a decision in `idle_steps`, see `CaptureQueue`. `counts`
    gives how many steps of 0, 1, … tokens were run so far, up to a size.
    """

    queue: CaptureQueue
    captures: CountedCaptures
    limit: MemoryLimit

    def __init__(
        self,
        strategy: Strategy,
        memory_limit: int | float | None,
        captures: Captures,
        dispatcher: Dispatcher,
        counts: Callable[[int], Sequence[int]] = lambda largest: (),
    ) -> None:
        self.active = False
        self.is_eager = isinstance(strategy, Eager)
        self._strategy = strategy
        self._memory_limit = memory_limit
        self._captures = captures
        self._dispatcher = dispatcher
        self._counts = counts
        self._records = captures.records
        self.settings = TorchState.now()
        """Those under which graphs are captured between steps."""
        self._others = ""
        """The settings that are others, while captures wait for them."""
        self._left: tuple[list[GraphState], float] = [], 0.0
        """The graphs that there were before they were freed to return, and when that was."""
        self._probes: Iterator[float] | None = None
        """The forecast in progress, on which a startup set waits while the model serves."""
        self._start_over()

    def _start_over(self) -> None:
        strategy, plan = self._strategy, self._captures.plan
        self.queue = CaptureQueue(strategy.kind, plan)
        self.captures = CountedCaptures(self._captures, self.queue)
        self.limit = MemoryLimit(self._memory_limit, self.captures, self._counts)
        self.idle_steps = self.queue.idle_steps
        lazy_bytes = strategy.max_bytes if isinstance(strategy, Lazy) else None
        self._lazy = LazyBytes(lazy_bytes, self.queue.states, plan.entries)
        self._probes = None

    @property
    def memory(self) -> GraphMemory:
        """The bytes that graphs take."""
        return self.captures.memory

    def wanted_at_startup(self) -> list[int]:
        """The graphs that `startup` will try to capture, in order."""
        if self._by_phase:
            return [i for phase in self._captures.plan.phases for i in phase.order]
        return [graph_index for graph_index, *_ in self.queue.startup()]

    def startup(self, progress: Progress | None = None, *, serving: bool = False) -> None:
        """Capture what the strategy wants at startup; `progress` is called per capture.

        In `serving`, between two steps, a dummy batch that fails is no error.
        """
        self._probes = None
        self.limit.apply()
        self._capture_startup_set(progress, serving)
        while self.limit.exceeded or (self.is_eager and self.limit.make_room()):
            self.limit.return_to_limit()
            self._capture_startup_set(progress, serving)
        if self.is_eager:
            self.limit.use_room(progress)
        self._refresh_active()
        for phase in self._captures.plan.phases:
            self._records.add(self._summary(phase))
        if self.memory.forecast is not None:
            captured = [i for i, state in enumerate(self.queue.states) if state.captured]
            self._records.add(self.memory.accuracy(captured))

    def startup_while_serving(self) -> None:
        """Capture the startup set between the next steps, within the budget of each; before it
        the probes that a memory limit needs."""
        if self.limit.is_set:
            self._probes = self.limit.probing(serving=True)
        else:
            self._add_startup_set()
        self._refresh_active()

    def before_step(self, batch: Batch, decision: Decision | None = None, *modes: Modes) -> bool:
        """Capture what the strategy wants before `batch` runs, within the budget of one step.

        Returns whether graphs changed, so that `decision` no longer holds.
        """
        wanted = self._dispatcher.wanted(batch, *modes).graph_index
        self.queue.see(wanted)
        changes, budget = self._captures.changes, CaptureBudget(self._strategy.captures_per_step)
        if self._probe(budget):
            self._spend(budget, self.queue.between_steps(wanted))
        changed = self._captures.changes != changes
        idle = not changed and self._probes is None and self.queue.nothing_to_capture(wanted)
        if idle and decision is not None:
            self.queue.add_idle(decision, wanted, batch.num_reqs)
        return changed

    def idle(self, budget_ms: float) -> int:
        """Capture for at most `budget_ms` milliseconds, by estimate; returns how many graphs."""
        if not self.active:
            return 0
        self.queue.count_idle()
        budget = CaptureBudget(len(self._dispatcher.plan.entries), budget_ms)
        return self._spend(budget, self.queue.in_idle_time()) if self._probe(budget) else 0

    def released(self) -> None:
        """All graphs were freed: start over."""
        modes = self.memory.by_mode
        self._start_over()
        self.memory.by_mode = dict.fromkeys(modes, 0)
        self.active = False

    def left(self, used: Mapping[int, int]) -> None:
        """All graphs were freed; what there was returns between steps and in idle time."""
        if self.queue.untouched:
            return
        steps = {"steps": [used.get(i, 0) for i in range(len(self.queue.states))]}
        by_rank = [answer["steps"] for answer in self._captures.exchange("release", steps)]
        there = [state for state in self.queue.states if state.captured]
        self._left = there, time.perf_counter()
        self.queue.left([sum(of_graph) for of_graph in zip(*by_rank, strict=True)])
        self.memory.pool_freed()
        self._refresh_active()

    def take_out(self, indices: Collection[int]) -> None:
        """Free graphs that are never captured again."""
        for graph_index in indices:
            self.captures.evict(graph_index)
            self.queue.states[graph_index].dropped = True
        self._refresh_active()

    def recapture(self, indices: Collection[int]) -> None:
        """Free stale graphs, all of them before the first is captured again."""
        if not indices:
            return
        for graph_index in indices:
            self.captures.evict(graph_index)
        with self._captures.session(prepare=True) as session:
            for graph_index in indices:
                self.limit.capture(graph_index, session)
        self.limit.return_to_limit()
        self._refresh_active()

    @property
    def _by_phase(self) -> bool:
        """Whether the startup set is captured within the shares of the plan's phases."""
        return self.is_eager and self.limit.is_set and bool(self._captures.plan.phases)

    def _summary(self, phase: CapturePhase) -> PhaseCaptured:
        """What there is of the graphs of a phase."""
        states, entries = self.queue.states, self._captures.plan.entries
        captured = [i for i in phase.order if states[i].captured]
        growth = sum(states[i].bytes for i in captured)
        return PhaseCaptured(
            phase.name,
            len(captured),
            len(phase.order),
            round(100 * len(captured) / max(1, len(phase.order)), 1),
            max(0, growth),
            max(0, -growth),
            [entries[i].shape for i in captured],
        )

    def _add_startup_set(self) -> None:
        states = self.queue.states
        firsts = (next((i for i in g if not states[i].dropped), None) for g in self.queue.startup())
        self.queue.add(i for i in firsts if i is not None)

    def _probe(self, budget: CaptureBudget) -> bool:
        """Go on with a forecast, within `budget`; whether there is none left in progress."""
        while self._probes is not None:
            if budget.captures <= 0 or budget.ms <= 0:
                return False
            with allow_compilation():
                ms = next(self._probes, None)
            if ms is None:
                self._probes = None
                self.limit.drop_above()
                self._add_startup_set()
                self._refresh_active()
            else:
                budget.spend(ms)
        return True

    def _capture_startup_set(self, progress: Progress | None, serving: bool) -> None:
        groups: Iterable[list[int]] = self.queue.startup()
        if self._by_phase:
            groups = ([i] for i in self.memory.within_shares(self.queue.states))
        with self._captures.session(prepare=True) as session:
            for group in groups:
                for graph_index in group:
                    state = self.queue.states[graph_index]
                    if not state.captured and not state.dropped and self.limit.admits(graph_index):
                        state.kept = self.limit.capture(graph_index, session, serving=serving)
                        if state.kept and progress is not None:
                            progress(self._records.of(CaptureRecord)[-1])
                    if self.limit.exceeded:
                        return
                    if state.captured:
                        break

    def _spend(self, budget: CaptureBudget, indices: Iterator[int]) -> int:
        """Capture those of `indices`, in order, that fit the budget and the memory."""
        admitted = self._admitted(budget, indices)
        graph_index = next(admitted, None)
        if graph_index is None or not self._captures.backend.may_capture() or self._must_wait():
            return 0
        count = 0
        with self._captures.session(prepare=False) as session:
            while graph_index is not None:
                if self.limit.capture(graph_index, session):
                    if self.queue.is_kept(graph_index):
                        self.queue.states[graph_index].kept = True
                    else:
                        self._lazy.took(graph_index, self.captures.evict)
                    count += self.queue.states[graph_index].captured
                budget.spend(self.captures.estimate(graph_index))  # as just measured, on all ranks
                graph_index = None if self.limit.exceeded else next(admitted, None)
        self.limit.return_to_limit()
        self._refresh_active()
        return count

    def _must_wait(self) -> bool:
        """Whether settings of the process are others now, on any rank: a graph would keep what a
        thread that loads a model has set for a while, such as the default dtype."""
        changed = self.settings.changed_in_process(of_both=True)
        told = self._captures.exchange("settings of captures", {"changed": changed})
        others = next(filter(None, (one["changed"] for one in told)), "")
        if others and others != self._others:
            self._records.events.emit("capture.waits", level=logging.WARNING, changed=others)
        self._others = others
        return bool(others)

    def _admitted(self, budget: CaptureBudget, indices: Iterator[int]) -> Iterator[int]:
        for graph_index in indices:
            if budget.captures <= 0:
                return
            estimate = self.captures.estimate(graph_index)
            if estimate > budget.ms:
                reason = f"it takes about {estimate:.1f} ms, more than the budget has"
                self.captures.refused(graph_index, reason)
                return
            if self.limit.admits(graph_index) and self._within_lazy_limit(graph_index):
                yield graph_index

    def _within_lazy_limit(self, graph_index: int) -> bool:
        if self._lazy.limit is None or self.queue.is_kept(graph_index):
            return True
        self.queue.count_idle()
        if self._lazy.make_room(graph_index, self.captures.evict):
            return True
        reason = f"lazy recordings may take {self._lazy.limit} bytes, and none is worth less"
        self.captures.refused(graph_index, reason)
        return False

    def _refresh_active(self) -> None:
        """Steps capture as long as something can still be captured."""
        was_active = self.active
        catching_up = self._probes is not None or self.queue.adding
        self.active = catching_up or (not self.is_eager and not self.queue.complete)
        if was_active and not self.active:
            self._records.events.emit("capture.complete", level=logging.INFO, step=self.queue.step)
        there, began = self._left
        if there and all(state.captured or state.dropped for state in there):
            self._left = [], 0.0
            seconds = time.perf_counter() - began
            self._records.add(GraphsReturned(len(there), seconds, self.queue.step))
