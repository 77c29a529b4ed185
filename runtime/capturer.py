"""Carries out a capture strategy: at startup, between two steps, in idle time.

What to capture is the queue's choice; here it meets budgets, memory and other ranks. Whatever
enters a choice is the same on all ranks: the wanted slot, the number of the step, and outcomes of
captures, which ranks exchange before anyone uses a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from ..dispatch import Batch, Dispatcher, RuntimeMode
from ..errors import CaptureFailed, DummyStepFailed
from ..events import Events
from .backend import GraphBackend
from .capture_budget import CaptureBudget, CaptureCosts
from .capture_session import CaptureSession, capture_session
from .config import CaptureStrategy, Config
from .eviction import make_room, trim
from .graph_memory import Exchange, GraphMemory, limit_in_bytes
from .monitors import meant
from .random_state import same_random_state
from .slot_actions import SlotActions
from .strategies import CaptureQueue


class Capturer:
    """The captures of one prepared model. `active` says whether steps may capture."""

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        backend: GraphBackend,
        events: Events,
        actions: SlotActions,
        exchange: Exchange,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._entries = dispatcher.plan.entries
        self._backend = backend
        self._events = events
        self._actions = actions
        self._exchange = exchange
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Know nothing of recordings yet, or any more: all were released."""
        strategy, plan = self._config.strategy, self._dispatcher.plan
        self.active = False
        self.memory = GraphMemory()
        self.queue = CaptureQueue(strategy, plan, self._config.min_hits)
        self._costs = CaptureCosts()
        self._lazy_cost: dict[RuntimeMode, int] = {}
        self._refused: set[int] = set()
        self._pool: Any = None

    def startup(self) -> None:
        """Capture what the strategy wants before serving and is not there yet."""
        if self.queue.untouched:
            self._forget_failed_probes()
            if self._config.memory_limit is not None:
                self._plan_memory()
        with self._session(prepare=True) as session:
            for group in self.queue.startup():
                for slot in group:
                    state = self.queue.slots[slot]
                    if not state.captured and not state.dropped and self._within_limit(slot):
                        state.kept = self._capture(slot, session, serving=False)
                    if state.captured:
                        break
        self._settle()
        self._tell_accuracy()

    def before_step(self, batch: Batch) -> bool:
        """Capture what the strategy wants now that `batch` comes, within the budget of a step.

        Returns whether later steps may capture too.
        """
        wanted = self._dispatcher.wanted(batch).slot
        self.queue.see(wanted)
        budget = CaptureBudget(self._config.captures_per_step, self._config.capture_ms_per_step)
        self._spend(budget, self.queue.between_steps(wanted))
        return self.active

    def idle(self, budget_ms: float) -> int:
        """Capture for at most `budget_ms` milliseconds, by estimate; returns how many graphs."""
        budget = CaptureBudget(len(self._entries), budget_ms)
        return self._spend(budget, self.queue.in_idle_time()) if self.active else 0

    def recapture(self, slots: Collection[int]) -> None:
        """Free recordings that became stale, all of them before the first is captured again."""
        if not slots:
            return
        for slot in slots:
            self._evict(slot)
        with self._session(prepare=True) as session:
            for slot in slots:
                self._capture(slot, session)
        self._settle()

    def _spend(self, budget: CaptureBudget, slots: Iterator[int]) -> int:
        """Capture of `slots`, in order, those that fit the budget and the memory."""
        chosen = self._choose(budget, slots)
        slot = next(chosen, None)
        if slot is None:
            return 0
        made = 0
        with self._session(prepare=False) as session:
            while slot is not None:
                made += self._capture(slot, session) and self._keep_lazy_bytes(slot)
                budget.spend(self._estimate(slot))  # as it was just measured, on all ranks
                slot = next(chosen, None)
        self._settle()
        return made

    def _choose(self, budget: CaptureBudget, slots: Iterator[int]) -> Iterator[int]:
        for slot in slots:
            if budget.spent:
                return
            estimate = self._estimate(slot)
            if not budget.admits(estimate):
                self._refuse(slot, f"it takes about {estimate:.1f} ms, more than the budget has")
            elif self._within_limit(slot) and self._within_lazy_bytes(slot):
                yield slot

    def _estimate(self, slot: int) -> float:
        entry = self._entries[slot]
        return self._costs.estimate(entry.mode, entry.descriptor.num_tokens)

    def _capture(self, slot: int, session: CaptureSession, *, serving: bool = True) -> bool:
        """One capture, on all ranks or on none; whether the graph is there now.

        Raises DummyStepFailed unless there are steps to be `serving`, which go on without a graph.
        """
        entry, state = self._entries[slot], self.queue.slots[slot]
        began = self._clock()
        recording, reason = None, ""
        tolerated = (CaptureFailed, DummyStepFailed) if serving else (CaptureFailed,)
        try:
            recording = self._actions.record(slot, session)
        except tolerated as error:
            reason = str(error)
        ms = (self._clock() - began) * 1000
        num_bytes = recording.bytes if recording else 0
        ms, num_bytes, reason = self._outcome(slot, ms, num_bytes, reason)
        self._costs.measured(entry.mode, entry.descriptor.num_tokens, ms)
        if recording is None or reason:
            if recording:
                recording.release()
            self._remember_failure(slot, reason)
            return False
        self._actions.install(slot, recording)
        state.captured, state.bytes, state.launches = True, num_bytes, recording.operations
        self.memory.took(entry.mode, num_bytes)
        self._refused.discard(slot)
        self._events.emit(
            "capture",
            **self._facts(slot),
            ms=ms,
            bytes=num_bytes,
            segments=len(recording.segments),
            descriptor=entry.descriptor.as_json(),
        )
        return True

    def _outcome(self, slot: int, ms: float, num_bytes: int, reason: str) -> tuple[float, int, str]:
        """The outcome that all ranks go by: the slowest, the largest, and anyone's failure."""
        outcomes = self._exchange(
            f"capture of slot {slot} at step {self.queue.step}",
            {"ms": ms, "bytes": num_bytes, "reason": reason},
        )
        failures = [f"rank {i}: {o['reason']}" for i, o in enumerate(outcomes) if o["reason"]]
        return (
            max(outcome["ms"] for outcome in outcomes),
            max(outcome["bytes"] for outcome in outcomes),
            reason if len(outcomes) == 1 else "; ".join(failures),
        )

    def _remember_failure(self, slot: int, reason: str) -> None:
        self.queue.failed(slot)
        state = self.queue.slots[slot]
        self._events.emit(
            "capture.failed",
            level=logging.WARNING,
            **self._facts(slot),
            reason=reason,
            retry_at_step=None if state.dropped else state.retry_at,
        )

    def _within_limit(self, slot: int) -> bool:
        entry = self._entries[slot]
        if self.memory.admits(entry.mode, entry.descriptor.num_tokens):
            return True
        self._refuse(slot, f"it would pass the memory limit of {self.memory.limit} bytes")
        return False

    def _within_lazy_bytes(self, slot: int) -> bool:
        """Whether lazy recordings leave room, after evicting those of less worth."""
        limit, slots = self._config.lazy_bytes, self.queue.slots
        if limit is None or self._config.strategy is not CaptureStrategy.LAZY:
            return True
        expected = self._lazy_cost.get(self._entries[slot].mode, 0)
        if make_room(slots, self._entries, slot, expected, limit, self._evict):
            return True
        self._refuse(slot, f"lazy recordings may take {limit} bytes, and none is worth less")
        return False

    def _keep_lazy_bytes(self, slot: int) -> bool:
        """Learn what a lazy recording takes; returns whether `slot` may keep its own."""
        state, limit = self.queue.slots[slot], self._config.lazy_bytes
        if limit is not None and self._config.strategy is CaptureStrategy.LAZY:
            self._lazy_cost[self._entries[slot].mode] = state.bytes
            trim(self.queue.slots, limit, self._evict)
        return state.captured

    def _evict(self, slot: int) -> None:
        state, before = self.queue.slots[slot], self._backend.memory().used
        self._actions.remove(slot)
        freed = before - self._backend.memory().used
        answers = self._exchange(f"eviction of slot {slot}", {"freed": freed})
        freed = min(answer["freed"] for answer in answers)
        self.memory.took(self._entries[slot].mode, -freed)
        self._events.emit("capture.evicted", **self._facts(slot), freed=freed)
        state.captured, state.bytes = False, 0

    def _refuse(self, slot: int, reason: str) -> None:
        """A slot is refused silently after the first time, until it was captured."""
        if slot not in self._refused:
            self._refused.add(slot)
            self._events.emit(
                "capture.refused", level=logging.INFO, **self._facts(slot), reason=reason
            )

    def _settle(self) -> None:
        """Steps capture as long as something may still be captured."""
        was = self.active
        lazily = self._config.strategy is not CaptureStrategy.EAGER
        self.active = lazily and not self.queue.complete
        if was and not self.active:
            self._events.emit("capture.complete", level=logging.INFO, step=self.queue.step)

    def expected_bytes(self) -> int:
        """Bytes of all graphs: those that are there, and those that are still to come."""
        if self._entries and self.queue.untouched:
            self._forget_failed_probes()
            if self.memory.forecast is None:
                self._plan_memory()
        if self.memory.forecast is None or self.queue.complete:
            return self.memory.used
        slots = [slot for slot, state in enumerate(self.queue.slots) if not state.dropped]
        return max(self.memory.used, self.memory.forecast_of(self._dispatcher.plan, slots))

    def _forget_failed_probes(self) -> None:
        """Probe anew if some failed: they may have lacked what a capture is given."""
        if self.memory.impossible:
            self.memory = GraphMemory()
            self._drop(())

    def _plan_memory(self) -> None:
        """Forecast what graphs take, unless it is known, and drop those that would pass a limit."""
        plan, exchange, events = self._dispatcher.plan, self._exchange, self._events
        limit = limit_in_bytes(self._config.memory_limit, self._backend.memory())
        if self.memory.forecast is None:
            with meant(), same_random_state():
                self.memory.probe(plan, self._backend, self._actions.record, exchange, events)
        self._drop(self.memory.keep(limit, plan, self._dispatcher.histogram, exchange, events))

    def _drop(self, slots: Collection[int]) -> None:
        for slot, state in enumerate(self.queue.slots):
            state.dropped = slot in slots

    def _tell_accuracy(self) -> None:
        """What the startup set was expected to take, and what it took."""
        if self.memory.forecast is None:
            return
        captured = [slot for slot, state in enumerate(self.queue.slots) if state.captured]
        expected = self.memory.forecast_of(self._dispatcher.plan, captured)
        self._events.emit(
            "memory.accuracy",
            level=logging.INFO,
            forecast=expected,
            actual=self.memory.used,
            accuracy=self.memory.used / expected if expected else None,
        )

    def _facts(self, slot: int) -> dict[str, Any]:
        entry = self._entries[slot]
        return {
            "mode": entry.mode.name,
            "num_tokens": entry.descriptor.num_tokens,
            "slot": slot,
            "step": self.queue.step,
        }

    @contextmanager
    def _session(self, *, prepare: bool) -> Iterator[CaptureSession]:
        if self._pool is None:
            self._pool = self._backend.new_pool()
        with (
            meant(),
            same_random_state(),
            capture_session(self._backend, self._pool, self._events, prepare=prepare) as session,
        ):
            yield session
