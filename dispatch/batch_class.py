"""A lane: all facts of a batch but its counts. Batches of one lane share one row of decisions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from .decision import Reason
from .descriptor import Batch
from .modes import RuntimeMode
from .plan import DispatchPlan, PlanEntry, axis_values


class Lane(NamedTuple):
    """`modes` has the bit `1 << mode` for each runtime mode that may be used."""

    query_len: int | None
    max_query_len: int | None
    num_loras: int
    cascade: bool
    axes: tuple[tuple[str, int], ...]
    modes: int


def lane_of(
    plan: DispatchPlan,
    batch: Batch,
    allowed_modes: Collection[RuntimeMode] | None = None,
    excluded_modes: Collection[RuntimeMode] | None = None,
) -> Lane:
    """The lane of `batch`; None allows every mode and excludes none, an empty collection is empty.

    Raises BatchInvalid if the batch's axes are not the plan's.
    """
    query_len = bound = None
    if batch.is_decode:
        query_len = batch.query_len
        bound = batch.max_query_len if query_len is None else query_len
    modes = ALL_MODES if allowed_modes is None else mode_bits(allowed_modes)
    if excluded_modes is not None:
        modes &= ~mode_bits(excluded_modes)
    axes = axis_values(plan.axes, batch) if plan.axes or batch.axes else ()
    return Lane(query_len, bound, batch.num_loras, batch.cascade, axes, modes)


def contradiction(batch: Batch, lane: Lane) -> str | None:
    """What cannot be in the facts of `batch`, which is of `lane`; None if nothing."""
    num_tokens, num_reqs = batch.num_tokens, batch.num_reqs
    if num_tokens < 0 or num_reqs < 0 or batch.num_loras < 0:
        return "a count is negative"
    if num_reqs > num_tokens:
        return f"{num_reqs} requests cannot share {num_tokens} tokens"
    if lane.query_len is not None and num_reqs * lane.query_len != num_tokens:
        return f"{num_reqs} requests of query_len {lane.query_len} do not have {num_tokens} tokens"
    if lane.max_query_len is not None and num_reqs * lane.max_query_len < num_tokens:
        return f"{num_reqs} requests up to max_query_len {lane.max_query_len} have fewer tokens"
    return None


def mode_bits(modes: Iterable[RuntimeMode]) -> int:
    """The set of `modes` as an integer, bit `1 << mode` each."""
    return sum(1 << mode for mode in set(modes))


ALL_MODES = mode_bits(RuntimeMode)


def lane_obstacle(plan: DispatchPlan, entry: PlanEntry, lane: Lane) -> Reason | None:
    """What keeps the whole lane from the graph of `entry`, whatever the counts; None if nothing."""
    key = entry.descriptor
    if key.uniform_query_len is not None and key.uniform_query_len != lane.query_len:
        return Reason.CAPABILITY
    if key.max_query_len is not None and not _within(lane.max_query_len, key.max_query_len):
        return Reason.CAPABILITY
    for axis, (_, room), (_, value) in zip(plan.axes, key.axes, lane.axes, strict=True):
        if value > room or (value < room and not axis.rounds_up):
            return Reason.AXIS
    if lane.num_loras > key.lora_case:
        return Reason.LORA_CASE_MISSING
    if lane.cascade and entry.mode is RuntimeMode.FULL:
        return Reason.CASCADE
    if not lane.modes >> entry.mode & 1:
        return Reason.EXCLUDED
    return None


def _within(length: int | None, bound: int) -> bool:
    return length is not None and length <= bound
