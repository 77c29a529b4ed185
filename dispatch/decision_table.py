"""Decision tables: for one batch class, the decision for each number of tokens, computed once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .batch import NO_GRAPH, BatchDescriptor, Decision, Reason
from .batch_class import BatchClass, class_obstacle
from .modes import RuntimeMode
from .plan import DispatchPlan, PlanEntry

NEARNESS = (
    Reason.CAPABILITY,
    Reason.AXIS,
    Reason.LORA_CASE_MISSING,
    Reason.CASCADE,
    Reason.EXCLUDED,
    Reason.ABOVE_LARGEST_SIZE,
    Reason.TOO_MANY_REQS,
    Reason.PADDING_LIMIT,
    Reason.NOT_CAPTURED,
    Reason.NO_TOKENS,
)
"""Obstacles in the order in which they are checked. A later one means a closer candidate."""


class Preference:
    """The plan's graph indices from most to least preferred.

    The better mode wins and, within a mode, the fewer padded tokens: padding alone cannot be
    compared between modes, because NONE has none.
    """

    def __init__(self, plan: DispatchPlan) -> None:
        self.plan = plan
        self.order = tuple(sorted(range(len(plan.entries)), key=self._rank))
        sizes = (entry.descriptor.num_tokens for entry in plan.entries)
        self.least_tokens = tuple(map(plan.least_tokens, sizes))

    def _rank(self, graph_index: int) -> tuple[object, ...]:
        mode, key = self.plan.entries[graph_index].mode, self.plan.entries[graph_index].descriptor
        return (
            -mode,
            key.num_tokens,
            key.lora_case,
            key.axes,
            not key.for_decode,
            key.max_query_len or 0,
            key.num_reqs or sys.maxsize,
        )


MOST_ABOVE = 256
"""Most decisions that a table keeps above the largest size."""


class DecisionTable:
    """The decisions of one batch class by number of tokens, made when one first occurs."""

    def __init__(self, preference: Preference, kind: BatchClass, captured: Sequence[bool]) -> None:
        plan = preference.plan
        self.preference = preference
        self.kind = kind
        self.captured = captured
        self.decisions: dict[int, Decision] = {}
        self._class_obstacles = {
            graph_index: class_obstacle(plan, plan.entries[graph_index], kind)
            for graph_index in preference.order
        }

    def obstacles(self, num_tokens: int, num_reqs: int = 0) -> dict[int, Reason | None]:
        """Why a batch cannot use each graph, None where it can; most preferred first."""
        return {
            graph_index: obstacle or self._count_obstacle(graph_index, num_tokens, num_reqs)
            for graph_index, obstacle in self._class_obstacles.items()
        }

    def _count_obstacle(self, graph_index: int, num_tokens: int, num_reqs: int) -> Reason | None:
        key = self.preference.plan.entries[graph_index].descriptor
        if num_tokens == 0:
            return Reason.NO_TOKENS
        if num_tokens > key.num_tokens:
            return Reason.ABOVE_LARGEST_SIZE
        if key.num_reqs is not None and num_reqs > key.num_reqs:
            return Reason.TOO_MANY_REQS
        if num_tokens < self.preference.least_tokens[graph_index]:
            return Reason.PADDING_LIMIT
        if not self.captured[graph_index]:
            return Reason.NOT_CAPTURED
        return None

    def decide(self, num_tokens: int, num_reqs: int = 0) -> Decision:
        """Compute the decision for these counts."""
        entries = self.preference.plan.entries
        obstacles = self.obstacles(num_tokens, num_reqs)
        chosen = next(
            (graph_index for graph_index, reason in obstacles.items() if reason is None), NO_GRAPH
        )
        mode = RuntimeMode.NONE if chosen == NO_GRAPH else entries[chosen].mode
        better = {
            why
            for graph_index, why in obstacles.items()
            if why is not None and entries[graph_index].mode > mode
        }
        missed = max(better, key=NEARNESS.index, default=None)
        if chosen == NO_GRAPH:
            why = missed or Reason.CAPABILITY
            return none_decision(self.preference.plan, self.kind, num_tokens, why)
        return graph_decision(entries[chosen], chosen, self.kind, num_tokens, missed)

    def at(self, num_tokens: int) -> Decision:
        """The stored decision for a number of tokens; it holds up to its `max_reqs` requests.

        In a class of one query length the number of tokens determines the number of requests.
        """
        decision = self.decisions.get(num_tokens)
        if decision is None:
            if len(self.decisions) > self.preference.plan.largest + MOST_ABOVE:
                self.decisions.clear()  # others hold this dict
            num_reqs = 0 if self.kind.query_len is None else most_reqs(self.kind, num_tokens)
            decision = self.decisions[num_tokens] = self.decide(num_tokens, num_reqs)
        return decision


def graph_decision(
    entry: PlanEntry,
    graph_index: int,
    kind: BatchClass,
    num_tokens: int,
    missed: Reason | None = None,
) -> Decision:
    key = entry.descriptor
    if kind.query_len is not None and key.uniform_query_len is None:
        reason = Reason.RELAXED
    else:
        reason = Reason.EXACT if num_tokens == key.num_tokens else Reason.PADDED
    max_reqs = most_reqs(kind, num_tokens)
    if key.num_reqs is not None:
        max_reqs = min(max_reqs, key.num_reqs)
    return Decision(entry.mode, key, graph_index, reason, missed, max_reqs=max_reqs)


def none_decision(
    plan: DispatchPlan, kind: BatchClass, num_tokens: int, reason: Reason
) -> Decision:
    """NONE runs the batch unpadded, except up to the fewest tokens of the model."""
    padded = max(num_tokens, plan.min_num_tokens)
    descriptor = BatchDescriptor(padded, lora_case=kind.num_loras, axes=kind.axes)
    max_reqs = most_reqs(kind, num_tokens)
    return Decision(RuntimeMode.NONE, descriptor, NO_GRAPH, reason, reason, max_reqs=max_reqs)


def most_reqs(kind: BatchClass, num_tokens: int) -> int:
    """The largest number of requests that can share `num_tokens`."""
    return num_tokens // (kind.query_len or 1)
