"""The dispatcher: from a batch to a decision by two integer look-ups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ..errors import BatchInvalid, DecisionNotPossible, NoModeLeft
from .batch_class import Lane, contradiction, lane_of
from .decision import NO_GRAPH, Decision, Reason
from .decision_table import Preference, Row, graph_decision, none_decision
from .descriptor import Batch
from .modes import RuntimeMode
from .plan import DispatchPlan, PlanEntry
from .sizing.histogram import Histogram

_KEPT = 256
"""How many rows, and how many decisions above the largest size, are kept before starting anew."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One entry of the plan as one batch sees it; `obstacle` is None if it could serve it."""

    entry: PlanEntry
    graph_index: int
    obstacle: Reason | None
    chosen: bool


class _Table:
    """The rows of one state of the captures, made when a lane is first seen."""

    def __init__(self, preference: Preference, captured: tuple[bool, ...]) -> None:
        self.preference = preference
        self.captured = captured
        self.rows: dict[Lane, Row] = {}
        self.above: dict[tuple[Lane, int], Decision] = {}

    def row(self, lane: Lane) -> Row:
        row = self.rows.get(lane)
        if row is None:
            if len(self.rows) >= _KEPT:
                self.rows = {}
            row = self.rows[lane] = Row(self.preference, lane, self.captured)
        return row

    def decide(self, batch: Batch, lane: Lane) -> Decision:
        if fault := contradiction(batch, lane):
            raise BatchInvalid(batch=batch, fault=fault)
        num_tokens = batch.num_tokens
        row = self.row(lane)
        if num_tokens < len(row.decisions):
            decision = row.at(num_tokens)
            if batch.num_reqs > decision.max_reqs:
                decision = row.decide(num_tokens, batch.num_reqs)
        else:
            decision = self._above(lane, num_tokens)
        if not lane.modes >> decision.mode & 1:
            allowed = [mode.name for mode in RuntimeMode if lane.modes >> mode & 1]
            raise NoModeLeft(batch=batch, allowed=allowed, reason=decision.reason.value)
        return decision

    def _above(self, lane: Lane, num_tokens: int) -> Decision:
        """The decision for more tokens than the largest size has."""
        decision = self.above.get((lane, num_tokens))
        if decision is None:
            if len(self.above) >= _KEPT:
                self.above = {}
            decision = self.row(lane).decide(num_tokens)
            if self.preference.plan.chunked and lane.modes >> RuntimeMode.PIECEWISE & 1:
                decision = self._chunks(lane, num_tokens, otherwise=decision)
            self.above[lane, num_tokens] = decision
        return decision

    def _chunks(self, lane: Lane, num_tokens: int, otherwise: Decision) -> Decision:
        """PIECEWISE over consecutive tokens: the largest graph as often as it is full, and a rest.

        Attention runs between the pieces on the whole batch, so only tokens need to be cut.
        """
        row = self.row(lane._replace(modes=1 << RuntimeMode.PIECEWISE))
        sizes = range(len(row.decisions) - 1, 0, -1)
        whole = next((d for n in sizes if (d := row.at(n)).graph_index != NO_GRAPH), None)
        if whole is None:
            return otherwise
        times, rest = divmod(num_tokens, whole.descriptor.num_tokens)
        chunks = (whole.graph_index,) * times + ((row.at(rest).graph_index,) if rest else ())
        if NO_GRAPH in chunks or self.preference.none_is_cheaper(chunks, num_tokens, lane):
            return otherwise
        return replace(whole, reason=Reason.CHUNKED, missed=otherwise.missed, chunks=chunks)


class Dispatcher:
    """Answers which graph serves a batch, best first, from tables built once per state.

    `dispatch` knows which indices are captured; `wanted` answers as if all were, which tells a
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
        self._record = None if histogram is None else histogram.add
        done = frozenset(captured)
        indices = range(len(plan.entries))
        self._lock = threading.Lock()
        self._registered = _Table(Preference(plan), tuple(True for _ in indices))
        self._live = _Table(
            self._registered.preference, tuple(graph_index in done for graph_index in indices)
        )
        lengths = (entry.descriptor.uniform_query_len for entry in plan.entries)
        self._query_lens = {length for length in lengths if length is not None} | {1}
        self._forget_hot_rows()

    def _forget_hot_rows(self) -> None:
        # batches below `_end` tokens and of a plain lane find their row here without making a Lane
        self._end = 0
        self._hot_in: dict[Lane, Row] | None = None
        self._mixed: list[Decision | None] = []
        self._uniform: dict[int | None, list[Decision | None]] = {}

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
        if self._record is not None:
            self._record(num_tokens)
        if (
            0 <= num_tokens < self._end
            and allowed_modes is None
            and excluded_modes is None
            and not (batch.num_loras or batch.cascade or batch.axes)
        ):
            # what contradicts itself matches no `max_reqs`, and is refused below
            if batch.is_decode:
                if row := self._uniform.get(batch.query_len):
                    decision = row[num_tokens]
                    if decision is not None and batch.num_reqs == decision.max_reqs:
                        return decision
            elif row := self._mixed:
                decision = row[num_tokens]
                if decision is not None and batch.num_reqs <= decision.max_reqs:
                    return decision
        if self._hot_in is not self._live.rows:
            self._find_hot_rows()
        return self._live.decide(batch, lane_of(self.plan, batch, allowed_modes, excluded_modes))

    def wanted(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> Decision:
        """What `dispatch` would answer if every graph were captured."""
        lane = lane_of(self.plan, batch, allowed_modes, excluded_modes)
        return self._registered.decide(batch, lane)

    def follow(self, graph_index: int, batch: Batch) -> Decision:
        """The decision that another rank made, `graph_index` or NO_GRAPH, for this rank's batch.

        Raises DecisionNotPossible if that graph cannot serve the batch here.
        """
        lane = lane_of(self.plan, batch)
        if graph_index == NO_GRAPH:
            return none_decision(lane, batch.num_tokens, Reason.RANK_DECISION)
        own = self._live.decide(batch, lane)
        if own.graph_index == graph_index:
            return replace(own, reason=Reason.RANK_DECISION)
        obstacles = self._live.row(lane).obstacles(batch.num_tokens, batch.num_reqs)
        obstacle = obstacles.get(graph_index, "no such graph")
        if obstacle not in (None, Reason.COST):
            raise DecisionNotPossible(graph_index=graph_index, batch=batch, reason=str(obstacle))
        decision = graph_decision(
            self.plan.entries[graph_index], graph_index, lane, batch.num_tokens
        )
        return replace(decision, reason=Reason.RANK_DECISION)

    def explain(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> tuple[Candidate, ...]:
        """Every entry of the plan, best first, with what keeps `batch` from it."""
        lane = lane_of(self.plan, batch, allowed_modes, excluded_modes)
        taken = self._live.decide(batch, lane)
        used = taken.chunks or (taken.graph_index,)
        obstacles = self._live.row(lane).obstacles(batch.num_tokens, batch.num_reqs)
        return tuple(
            Candidate(
                self.plan.entries[graph_index], graph_index, obstacle, chosen=graph_index in used
            )
            for graph_index, obstacle in obstacles.items()
        )

    def set_captured(self, graph_index: int, captured: bool) -> None:
        """State that the recording of `graph_index` is there, or is gone."""
        with self._lock:
            flags = list(self._live.captured)
            flags[graph_index] = captured
            self._live = _Table(self._live.preference, tuple(flags))
            self._forget_hot_rows()

    def is_captured(self, graph_index: int) -> bool:
        return self._live.captured[graph_index]

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
            self._hot_in = self._live.rows  # once these are dropped, nobody fills theirs any more
            self._mixed = self._live.row(lane_of(self.plan, Batch(0, 0))).decisions
            for query_len in self._query_lens:
                lane = lane_of(self.plan, Batch(0, 0, is_decode=True, query_len=query_len))
                self._uniform[query_len] = self._live.row(lane).decisions
            self._end = self.plan.largest + 1
