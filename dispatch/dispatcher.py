"""The dispatcher: from a batch to a decision by two integer look-ups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from ..errors import BatchInvalid, DecisionNotPossible, NoModeLeft
from .decision import NO_SLOT, Candidate, Decision, Reason
from .descriptor import Batch
from .histogram import Histogram
from .lane import Lane, lane_of
from .modes import RuntimeMode
from .plan import DispatchPlan
from .row import Preference, graph_decision, nearest, none_decision, paint

_KEPT = 1024
"""How many rows, and how many decisions above the largest size, are kept before starting anew."""


class _Table:
    """The rows painted so far for one state of the captures; replaced whole when that changes."""

    def __init__(self, preference: Preference, captured: tuple[bool, ...]) -> None:
        self.preference = preference
        self.captured = captured
        self.rows: dict[Lane, list[Decision]] = {}
        self.above: dict[tuple[Lane, int], Decision] = {}

    def row(self, lane: Lane) -> list[Decision]:
        row = self.rows.get(lane)
        if row is None:
            if len(self.rows) >= _KEPT:
                self.rows = {}
            row = self.rows[lane] = paint(self.preference, lane, self.captured)
        return row

    def beyond(self, lane: Lane, num_tokens: int) -> Decision:
        """The decision for more tokens than the largest size has."""
        decision = self.above.get((lane, num_tokens))
        if decision is None:
            if len(self.above) >= _KEPT:
                self.above = {}
            decision = self._chunks(lane, num_tokens) if self.preference.plan.chunked else None
            if decision is None:
                decision = none_decision(lane, num_tokens, self.row(lane)[-1].reason)
            self.above[lane, num_tokens] = decision
        return decision

    def _chunks(self, lane: Lane, num_tokens: int) -> Decision | None:
        """PIECEWISE over consecutive tokens: the largest graph as often as it is full, and a rest.

        Attention runs between the pieces on the whole batch, so only tokens need to be cut.
        """
        if not lane.modes & 1 << RuntimeMode.PIECEWISE:
            return None
        row = self.row(lane._replace(modes=1 << RuntimeMode.PIECEWISE))
        size = max((n for n, each in enumerate(row[:-1]) if each.slot != NO_SLOT), default=0)
        if not size:
            return None
        times, rest = divmod(num_tokens, size)
        chunks = (row[size].slot,) * times + ((row[rest].slot,) if rest else ())
        if NO_SLOT in chunks or self.preference.none_is_cheaper(chunks, num_tokens, lane):
            return None
        missed = self.row(lane)[-1].missed
        return replace(row[size], reason=Reason.CHUNKED, missed=missed, chunks=chunks)


class Dispatcher:
    """Answers which graph serves a batch, best first, from tables built once per state.

    `dispatch` knows which slots are captured; `wanted` answers as if all were, which tells a
    strategy what to capture next. Safe to use from several threads. `histogram`, if given, counts
    the tokens of every dispatched batch.
    """

    def __init__(
        self,
        plan: DispatchPlan,
        *,
        captured: Iterable[int] = (),
        histogram: Histogram | None = None,
    ) -> None:
        self.plan = plan
        self.histogram = histogram
        done = frozenset(captured)
        slots = range(len(plan.entries))
        self._lock = threading.Lock()
        self._registered = _Table(Preference(plan), tuple(True for _ in slots))
        self._live = _Table(self._registered.preference, tuple(slot in done for slot in slots))
        lengths = (entry.descriptor.uniform_query_len for entry in plan.entries)
        self._query_lens = {length for length in lengths if length is not None} | {1}
        self._forget_hot_rows()

    def _forget_hot_rows(self) -> None:
        # batches below `_end` tokens and of a plain lane find their row here without making a Lane
        self._end = 0
        self._mixed: list[Decision] = []
        self._uniform: dict[int | None, list[Decision]] = {}

    def dispatch(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> Decision:
        """The cheapest captured graph that fits `batch` (see `Preference`), or NONE, unpadded.

        Raises NoModeLeft if the modes allowed leave nothing, BatchInvalid for facts that
        contradict each other or the plan.
        """
        num_tokens = batch.num_tokens
        if self.histogram is not None:
            self.histogram.add(num_tokens)
        if (
            0 <= num_tokens < self._end
            and allowed_modes is None
            and excluded_modes is None
            and not (batch.num_loras or batch.cascade or batch.axes)
        ):
            row = self._uniform.get(batch.query_len) if batch.is_decode else self._mixed
            if row:
                decision = row[num_tokens]
                if batch.num_reqs <= decision.max_reqs:
                    return decision
        if not self._end:
            self._find_hot_rows()
        return _decide(self._live, batch, lane_of(self.plan, batch, allowed_modes, excluded_modes))

    def wanted(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> Decision:
        """What `dispatch` would answer if every slot were captured."""
        lane = lane_of(self.plan, batch, allowed_modes, excluded_modes)
        return _decide(self._registered, batch, lane)

    def follow(self, slot: int, batch: Batch) -> Decision:
        """The decision that another rank made, `slot` or NO_SLOT, for this rank's batch.

        Raises DecisionNotPossible if that graph cannot serve the batch here.
        """
        lane = lane_of(self.plan, batch)
        if slot == NO_SLOT:
            return none_decision(lane, batch.num_tokens, Reason.RANK_DECISION)
        own = _decide(self._live, batch, lane)
        if own.slot == slot:
            return replace(own, reason=Reason.RANK_DECISION)
        obstacles = _obstacles(self._live, batch, lane)
        obstacle = obstacles.get(slot, "no such slot")
        if obstacle not in (None, Reason.COST):
            raise DecisionNotPossible(slot=slot, batch=batch, reason=str(obstacle))
        entry = self.plan.entries[slot]
        decision = graph_decision(entry, slot, lane, batch.num_tokens)
        return replace(decision, reason=Reason.RANK_DECISION)

    def explain(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> tuple[Candidate, ...]:
        """Every entry of the plan, best first, with what keeps `batch` from it."""
        lane = lane_of(self.plan, batch, allowed_modes, excluded_modes)
        taken = _decide(self._live, batch, lane)
        used = taken.chunks or (taken.slot,)
        obstacles = _obstacles(self._live, batch, lane)
        return tuple(
            Candidate(entry.mode, entry.descriptor, slot, obstacle, slot in used)
            for slot, obstacle in obstacles.items()
            for entry in (self.plan.entries[slot],)
        )

    def set_captured(self, slot: int, captured: bool) -> None:
        """State that the recording of `slot` is there, or is gone."""
        with self._lock:
            flags = list(self._live.captured)
            flags[slot] = captured
            self._live = _Table(self._live.preference, tuple(flags))
            self._forget_hot_rows()

    def is_captured(self, slot: int) -> bool:
        return self._live.captured[slot]

    def set_costs(
        self, costs: Mapping[int, float], none_cost: Callable[[int], float] | None = None
    ) -> None:
        """Choose by measured cost from now on; see `Preference` for units and errors."""
        preference = Preference(self.plan, dict(costs), none_cost)
        with self._lock:
            self._registered = _Table(preference, self._registered.captured)
            self._live = _Table(preference, self._live.captured)
            self._forget_hot_rows()

    def _find_hot_rows(self) -> None:
        if self.plan.axes:
            return  # every batch names its axes, so no lane is plain
        with self._lock:
            plain = lane_of(self.plan, Batch(0, 0))
            self._mixed = self._live.row(plain)
            self._uniform = {
                query_len: self._live.row(lane_of(self.plan, Batch(0, 0, True, query_len)))
                for query_len in self._query_lens
            }
            self._end = self.plan.largest + 1


def _decide(table: _Table, batch: Batch, lane: Lane) -> Decision:
    plan = table.preference.plan
    if batch.num_tokens < 0 or batch.num_reqs < 0 or batch.num_loras < 0:
        raise BatchInvalid(batch=batch, fault="a count is negative")
    row = table.row(lane)
    if batch.num_tokens <= plan.largest:
        decision = row[batch.num_tokens]
    else:
        decision = table.beyond(lane, batch.num_tokens)
    if batch.num_reqs > decision.max_reqs:
        decision = _search(table, batch, lane)
    if not lane.modes >> decision.mode & 1:
        names = [mode.name for mode in RuntimeMode if lane.modes >> mode & 1]
        raise NoModeLeft(batch=batch, allowed=names, reason=decision.reason.value)
    return decision


def _search(table: _Table, batch: Batch, lane: Lane) -> Decision:
    """The best candidate with room for the batch's requests, which rows do not know."""
    entries = table.preference.plan.entries
    obstacles = _obstacles(table, batch, lane)
    for slot, obstacle in obstacles.items():
        if obstacle is None:
            entry = entries[slot]
            better = [
                o or Reason.COST for s, o in obstacles.items() if entries[s].mode > entry.mode
            ]
            missed = nearest(better)
            return graph_decision(entry, slot, lane, batch.num_tokens, missed)
    reason = nearest([o for o in obstacles.values() if o]) or Reason.CAPABILITY
    return none_decision(lane, batch.num_tokens, reason)


def _obstacles(table: _Table, batch: Batch, lane: Lane) -> dict[int, Reason | None]:
    """What keeps the batch from each slot, the best slot first."""
    preference, captured = table.preference, table.captured
    n, num_reqs = batch.num_tokens, batch.num_reqs
    return {
        slot: preference.obstacle(slot, lane, n, num_reqs, captured[slot])
        for slot in preference.order
    }
