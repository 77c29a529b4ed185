"""Rows: for one lane, the decision for each number of tokens, painted from the plan's intervals.

The graph of an entry serves the token counts from the least that the padding limit allows up to
its size, so a row is painted in slices: the dearest candidate first, the cheapest last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import PlanInvalid
from .decision import NO_SLOT, Decision, Reason
from .descriptor import BatchDescriptor
from .lane import Lane, lane_obstacle
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
    Reason.COST,
)
"""Obstacles in the order in which they are met: the later, the nearer a candidate came."""
_LEVEL = {reason: level for level, reason in enumerate(NEARNESS)}


def nearest(obstacles: Iterable[Reason]) -> Reason | None:
    """The obstacle of the candidate that came nearest."""
    return max(obstacles, key=_LEVEL.__getitem__, default=None)


class Preference:
    """The plan's slots from the cheapest to the dearest, and the token counts each can serve.

    Without `costs` the better mode is the cheaper and, within a mode, the fewer padded tokens:
    padding alone cannot be compared between modes, since NONE has none. With measured `costs`
    (seconds by slot; `none_cost` in seconds by number of tokens) the least cost wins and NONE
    competes; on equal cost the better mode, then the fewer tokens. Raises PlanInvalid unless
    every slot has a cost.
    """

    def __init__(
        self,
        plan: DispatchPlan,
        costs: Mapping[int, float] | None = None,
        none_cost: Callable[[int], float] | None = None,
    ) -> None:
        if costs is not None and costs.keys() != set(range(len(plan.entries))):
            raise PlanInvalid(fault="the measured costs do not cover just its slots")
        self.plan = plan
        self.costs = costs
        self.none_cost = none_cost if costs is not None else None
        self.order = tuple(sorted(range(len(plan.entries)), key=self._rank))
        sizes = [entry.descriptor.num_tokens for entry in plan.entries]
        self.spans = tuple((plan.padding.least_tokens(size), size) for size in sizes)

    def _rank(self, slot: int) -> tuple[object, ...]:
        mode, key = self.plan.entries[slot].mode, self.plan.entries[slot].descriptor
        return (
            self.costs[slot] if self.costs else 0.0,
            -mode,
            key.num_tokens,
            key.lora_case,
            key.axes,
            not key.for_decode,
            key.max_query_len or 0,
            key.num_reqs or sys.maxsize,
        )

    def none_is_cheaper(self, slots: Sequence[int], num_tokens: int, lane: Lane) -> bool:
        if self.costs is None or self.none_cost is None or not lane.modes & 1 << RuntimeMode.NONE:
            return False
        return self.none_cost(num_tokens) < sum(self.costs[slot] for slot in slots)

    def obstacle(
        self, slot: int, lane: Lane, num_tokens: int, num_reqs: int, captured: bool
    ) -> Reason | None:
        """What keeps one batch from one slot, by the definitions that `paint` uses in bulk."""
        entry = self.plan.entries[slot]
        least, size = self.spans[slot]
        if num_tokens == 0:
            return Reason.NO_TOKENS
        if reason := lane_obstacle(self.plan, entry, lane):
            return reason
        if num_tokens > size:
            return Reason.ABOVE_LARGEST_SIZE
        if entry.descriptor.num_reqs is not None and num_reqs > entry.descriptor.num_reqs:
            return Reason.TOO_MANY_REQS
        if num_tokens < least:
            return Reason.PADDING_LIMIT
        if not captured:
            return Reason.NOT_CAPTURED
        return Reason.COST if self.none_is_cheaper((slot,), num_tokens, lane) else None


def paint(preference: Preference, lane: Lane, captured: Sequence[bool]) -> list[Decision]:
    """Decisions by number of tokens, 0 to the largest size; one more stands for all above.

    They hold for any number of requests that the decision's `max_reqs` admits.
    """
    plan = preference.plan
    end = plan.largest + 2
    best = [NO_SLOT] * end
    strokes: list[tuple[int, RuntimeMode, int, int]] = []
    for slot in reversed(preference.order):
        entry, (least, size) = plan.entries[slot], preference.spans[slot]
        if reason := lane_obstacle(plan, entry, lane):
            strokes.append((_LEVEL[reason], entry.mode, 1, end))
            continue
        inside = Reason.COST if captured[slot] else Reason.NOT_CAPTURED
        strokes.append((_LEVEL[Reason.ABOVE_LARGEST_SIZE], entry.mode, size + 1, end))
        strokes.append((_LEVEL[Reason.PADDING_LIMIT], entry.mode, 1, least))
        strokes.append((_LEVEL[inside], entry.mode, least, size + 1))
        if captured[slot]:
            best[least : size + 1] = [slot] * (size + 1 - least)
    nearest = {mode: [-1] * end for mode in RuntimeMode}
    for level, mode, start, stop in sorted(strokes):
        nearest[mode][start:stop] = [level] * (stop - start)
    if preference.none_cost:
        for n, slot in enumerate(best):
            if slot != NO_SLOT and preference.none_is_cheaper((slot,), n, lane):
                best[n] = NO_SLOT
    return _decisions(plan, lane, best, nearest)


def _decisions(
    plan: DispatchPlan, lane: Lane, best: list[int], nearest: Mapping[RuntimeMode, list[int]]
) -> list[Decision]:
    shared: dict[tuple[int, bool, int], Decision] = {}
    row = [none_decision(lane, 0, Reason.NO_TOKENS)]
    full, piecewise = nearest[RuntimeMode.FULL], nearest[RuntimeMode.PIECEWISE]
    for n in range(1, len(best)):
        slot = best[n]
        if slot == NO_SLOT:
            level = max(full[n], piecewise[n], 0)
            row.append(none_decision(lane, n, NEARNESS[level]))
            continue
        entry = plan.entries[slot]
        level = -1 if entry.mode is RuntimeMode.FULL else full[n]
        key = (slot, n == entry.descriptor.num_tokens, level)
        if key not in shared:
            missed = None if level < 0 else NEARNESS[level]
            shared[key] = graph_decision(entry, slot, lane, n, missed)
        row.append(shared[key])
    return row


def graph_decision(
    entry: PlanEntry, slot: int, lane: Lane, num_tokens: int, missed: Reason | None = None
) -> Decision:
    key = entry.descriptor
    if lane.query_len is not None and key.uniform_query_len is None:
        reason = Reason.RELAXED
    else:
        reason = Reason.EXACT if num_tokens == key.num_tokens else Reason.PADDED
    room = sys.maxsize if key.num_reqs is None else key.num_reqs
    return Decision(entry.mode, key, slot, reason, missed, max_reqs=room)


def none_decision(lane: Lane, num_tokens: int, reason: Reason) -> Decision:
    """NONE runs the batch as it is: nothing is padded, neither rows nor adapters nor axes."""
    descriptor = BatchDescriptor(num_tokens, lora_case=lane.num_loras, axes=lane.axes)
    return Decision(RuntimeMode.NONE, descriptor, NO_SLOT, reason, reason)
