"""The dispatcher: from a batch to a decision with two integer lookups."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ..errors import BatchInvalid, DecisionNotPossible, NoModeLeft
from .batch import NO_GRAPH, Batch, Decision, Reason
from .batch_class import BatchClass, classify, contradiction
from .decision_table import DecisionTable, Preference, graph_decision, none_decision
from .modes import RuntimeMode
from .plan import DispatchPlan, PlanEntry

_MOST_TABLES = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """One entry of the plan for one batch; `obstacle` is None if the entry could serve it."""

    entry: PlanEntry
    graph_index: int
    obstacle: Reason | None
    chosen: bool


class _Tables:
    """The decision tables for one set of captured graphs, made when a class first occurs."""

    def __init__(self, preference: Preference, captured: tuple[bool, ...]) -> None:
        self.preference = preference
        self.captured = captured
        self.by_class: dict[BatchClass, DecisionTable] = {}

    def table(self, kind: BatchClass) -> DecisionTable:
        table = self.by_class.get(kind)
        if table is None:
            if len(self.by_class) >= _MOST_TABLES:
                self.by_class = {}
            table = self.by_class[kind] = DecisionTable(self.preference, kind, self.captured)
        return table

    def decide(self, batch: Batch, kind: BatchClass) -> Decision:
        if fault := contradiction(batch):
            raise BatchInvalid(batch=batch, fault=fault)
        table = self.table(kind)
        decision = table.at(batch.num_tokens)
        if batch.num_reqs > decision.max_reqs:
            decision = table.decide(batch.num_tokens, batch.num_reqs)
        if not kind.modes >> decision.mode & 1:
            allowed = [mode.name for mode in RuntimeMode if kind.modes >> mode & 1]
            raise NoModeLeft(batch=batch, allowed=allowed, reason=decision.reason.value)
        return decision


class Dispatcher:
    """Chooses the graph for each batch, from tables built once per set of captured graphs.

    `dispatch` chooses among the captured graphs; `wanted` chooses as if all were captured, which
    is what a strategy should capture next. Thread-safe.
    """

    def __init__(self, plan: DispatchPlan, *, captured: Iterable[int] = ()) -> None:
        self.plan = plan
        done = frozenset(captured)
        indices = range(len(plan.entries))
        self._lock = threading.Lock()
        self._registered = _Tables(Preference(plan), tuple(True for _ in indices))
        self._live = _Tables(
            self._registered.preference, tuple(graph_index in done for graph_index in indices)
        )
        lengths = (entry.descriptor.uniform_query_len for entry in plan.entries)
        self._query_lens = {length for length in lengths if length is not None} | {1}
        self._drop_fast_path()

    def _drop_fast_path(self) -> None:
        # mixed and uniform batches find the decisions that were made before here directly
        self._fast_path_of: dict[BatchClass, DecisionTable] | None = None
        self._mixed: dict[int, Decision] = {}
        self._uniform: dict[int | None, dict[int, Decision]] = {}

    def dispatch(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> Decision:
        """The preferred captured graph that fits `batch` (see `Preference`), or NONE, unpadded.

        Raises NoModeLeft if no allowed mode can serve the batch, and BatchInvalid for facts that
        contradict each other or the plan.
        """
        if allowed_modes is None and excluded_modes is None:
            try:
                decision = self._fast_path(batch)
            except Exception:  # no batch, or a fact such as a tensor: refused below
                decision = None
            if decision is not None:
                return decision
        if self._fast_path_of is not self._live.by_class:
            self._build_fast_path()
        return self._live.decide(batch, classify(self.plan, batch, allowed_modes, excluded_modes))

    def _fast_path(self, batch: Batch) -> Decision | None:
        """The decision for a batch without special facts; None for contradictory facts, too."""
        num_tokens, query_len = batch.num_tokens, batch.query_len
        if batch.num_loras or batch.cascade or batch.axes:
            return None
        if batch.is_decode is True:
            longest = batch.max_query_len
            if query_len is None or (longest is not None and longest < query_len):
                return None
            decisions = self._uniform.get(query_len)
            decision = decisions.get(num_tokens) if decisions else None
            fits = decision is not None and batch.num_reqs == decision.max_reqs
        else:
            if query_len is not None or batch.max_query_len is not None:
                return None
            decision = self._mixed.get(num_tokens) if batch.is_decode is False else None
            fits = decision is not None and 0 < batch.num_reqs <= decision.max_reqs
        return decision if fits else None

    def wanted(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> Decision:
        """What `dispatch` would return if every graph were captured."""
        kind = classify(self.plan, batch, allowed_modes, excluded_modes)
        return self._registered.decide(batch, kind)

    def follow(self, graph_index: int, batch: Batch) -> Decision:
        """Apply another rank's decision, `graph_index` or NO_GRAPH, to this rank's batch.

        A rank without tokens can follow any decision: its rows are all padding. Raises
        DecisionNotPossible if this graph cannot serve the batch here.
        """
        kind = classify(self.plan, batch)
        if graph_index == NO_GRAPH:
            return none_decision(self.plan, kind, batch.num_tokens, Reason.RANK_DECISION)
        captured = self._live.captured
        if not batch.num_tokens and graph_index < len(captured) and captured[graph_index]:
            decision = graph_decision(self.plan.entries[graph_index], graph_index, kind, 0)
            return replace(decision, reason=Reason.RANK_DECISION)
        own = self._live.decide(batch, kind)
        if own.graph_index == graph_index:
            return replace(own, reason=Reason.RANK_DECISION)
        obstacles = self._live.table(kind).obstacles(batch.num_tokens, batch.num_reqs)
        obstacle = obstacles.get(graph_index, "no such graph")
        if obstacle is not None:
            raise DecisionNotPossible(graph_index=graph_index, batch=batch, reason=str(obstacle))
        decision = graph_decision(
            self.plan.entries[graph_index], graph_index, kind, batch.num_tokens
        )
        return replace(decision, reason=Reason.RANK_DECISION)

    def explain(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> tuple[Candidate, ...]:
        """Every entry of the plan, most preferred first, with why `batch` cannot use it."""
        kind = classify(self.plan, batch, allowed_modes, excluded_modes)
        decision = self._live.decide(batch, kind)
        obstacles = self._live.table(kind).obstacles(batch.num_tokens, batch.num_reqs)
        return tuple(
            Candidate(
                self.plan.entries[graph_index],
                graph_index,
                obstacle,
                chosen=graph_index == decision.graph_index,
            )
            for graph_index, obstacle in obstacles.items()
        )

    def set_captured(self, graph_index: int, captured: bool) -> None:
        """Record that the graph of `graph_index` was captured or removed."""
        with self._lock:
            flags = list(self._live.captured)
            flags[graph_index] = captured
            self._live = _Tables(self._live.preference, tuple(flags))
            self._drop_fast_path()

    def _build_fast_path(self) -> None:
        if self.plan.axes:
            return  # batches with axes do not take the fast path
        with self._lock:
            self._fast_path_of = self._live.by_class
            self._mixed = self._live.table(classify(self.plan, Batch(0, 0))).decisions
            for query_len in self._query_lens:
                kind = classify(self.plan, Batch(0, 0, is_decode=True, query_len=query_len))
                self._uniform[query_len] = self._live.table(kind).decisions
