"""Runs a capture strategy: at startup, between two steps, and in idle time.

The queue chooses what to capture; the capturer applies the budgets. Every choice depends only on
facts that all ranks share: the wanted graph, the step number, and outcomes of captures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator

from ...dispatch import Batch, CaptureStrategy, Decision, RuntimeMode
from ..after_seal import allow_compilation
from ..records import CaptureRecord
from .admitted import CaptureBudget, LazyBytes
from .limited_captures import LimitedCaptures


class Capturer(LimitedCaptures):
    """The captures of one prepared model. `active` says whether steps may capture.

    A step need not call `before_step` for a decision in `idle_steps`, see `CaptureQueue`.
    """

    def begin(self) -> None:
        """Start over: no graph is captured."""
        super().begin()
        self.active = False
        self.idle_steps = self.queue.idle_steps
        lazily = self._config.strategy is CaptureStrategy.LAZY
        lazy_limit = self._config.lazy_bytes if lazily else None
        self._lazy = LazyBytes(lazy_limit, self.queue.states, self._entries)
        self._probes: Iterator[float] | None = None
        """The forecast in progress, on which a startup set waits while the model serves."""

    def startup(
        self,
        progress: Callable[[CaptureRecord], None] | None = None,
        *,
        serving: bool = False,
    ) -> None:
        """Capture what the strategy wants at startup; `progress` is called per capture.

        In `serving`, between two steps, a dummy batch that fails is no error.
        """
        self._probes = None
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
        """Capture the startup set between the next steps, within the budget of each; before it
        the probes that a memory limit needs."""
        if self._config.memory_limit is None:
            self._add_startup_set()
        else:
            self._probes = self._probing(serving=True)
        self._refresh_active()

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
                self._plan_limit()
                self._add_startup_set()
                self._refresh_active()
            else:
                budget.spend(ms)
        return True

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
        changes, budget = self._changes, CaptureBudget(self._config.captures_per_step)
        if not self._probe(budget):
            return False
        self._spend(budget, self.queue.between_steps(wanted))
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
        return self._spend(budget, self.queue.in_idle_time()) if self._probe(budget) else 0

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
                    if self.queue.is_kept(graph_index):
                        self.queue.states[graph_index].kept = True
                    else:
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
                reason = f"it takes about {estimate:.1f} ms, more than the budget has"
                self._log.refused(graph_index, reason)
                return
            if self._within_limit(graph_index) and self._within_lazy_limit(graph_index):
                yield graph_index

    def _estimate(self, graph_index: int) -> float:
        entry = self._entries[graph_index]
        return self._costs.estimate(entry.mode, entry.descriptor.num_tokens)

    def _within_lazy_limit(self, graph_index: int) -> bool:
        if self._lazy.limit is None or self.queue.is_kept(graph_index):
            return True
        self.queue.count_idle()
        if self._lazy.make_room(graph_index, self._evict):
            return True
        limit = self._lazy.limit
        self._log.refused(
            graph_index, f"lazy recordings may take {limit} bytes, and none is worth less"
        )
        return False

    def _refresh_active(self) -> None:
        """Steps capture as long as something can still be captured."""
        was = self.active
        lazily = self._config.strategy is not CaptureStrategy.EAGER
        catching_up = self._probes is not None or self.queue.adding
        self.active = catching_up or (lazily and not self.queue.complete)
        if was and not self.active:
            self._events.emit("capture.complete", level=logging.INFO, step=self.queue.step)
