"""Batch classes: batches that differ only in their counts share one decision table."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ..errors import BatchInvalid, InvalidSetting
from .batch import Batch, Reason, wrong_type
from .modes import RuntimeMode
from .plan import DispatchPlan, PlanEntry, axis_values


class BatchClass(NamedTuple):
    """All facts of a batch except its counts.

    `modes` is a bit set of the runtime modes that may be used, bit `1 << mode` each.
    """

    query_len: int | None
    max_query_len: int | None
    num_loras: int
    cascade: bool
    axes: tuple[tuple[str, int], ...]
    modes: int


def classify(
    plan: DispatchPlan,
    batch: Batch,
    allowed_modes: Collection[RuntimeMode] | None = None,
    excluded_modes: Collection[RuntimeMode] | None = None,
) -> BatchClass:
    """The class of `batch`. None allows every mode and excludes none; an empty set is empty.

    Raises BatchInvalid for a fact of another type and for axes that are not the plan's, and
    InvalidSetting for modes that are no collection of runtime modes.
    """
    if fault := wrong_type(batch):
        raise BatchInvalid(batch=batch, fault=fault)
    query_len = bound = None
    if batch.is_decode:
        query_len = batch.query_len
        bound = batch.max_query_len if query_len is None else query_len
    modes = ALL_MODES if allowed_modes is None else mode_bits("allowed_modes", allowed_modes)
    if excluded_modes is not None:
        modes &= ~mode_bits("excluded_modes", excluded_modes)
    axes = axis_values(plan.axes, batch) if plan.axes or batch.axes else ()
    return BatchClass(query_len, bound, batch.num_loras, batch.cascade, axes, modes)


def contradiction(batch: Batch) -> str | None:
    """The first contradiction among the facts of `batch`, or None."""
    num_tokens, num_reqs = batch.num_tokens, batch.num_reqs
    if num_tokens < 0 or num_reqs < 0 or batch.num_loras < 0:
        return "a count is negative"
    if num_reqs > num_tokens:
        return f"{num_reqs} requests cannot share {num_tokens} tokens"
    if num_tokens and not num_reqs:
        return f"num_reqs is 0, but there are {num_tokens} tokens"
    query_len, longest = batch.query_len, batch.max_query_len
    if query_len is not None and num_reqs * query_len != num_tokens:
        return f"{num_reqs} requests of query_len {query_len} do not have {num_tokens} tokens"
    if query_len is not None and longest is not None and query_len > longest:
        return f"query_len is {query_len}, but max_query_len is {longest}"
    if longest is not None and num_reqs * longest < num_tokens:
        return f"{num_reqs} requests of max_query_len {longest} have fewer tokens"
    return None


def mode_bits(name: str, modes: Iterable[RuntimeMode]) -> int:
    """The set of `modes`, the argument `name`, as an integer, bit `1 << mode` each."""
    try:
        return sum(1 << mode for mode in set(modes))
    except TypeError:
        expected = "a collection of RuntimeMode"
        raise InvalidSetting(
            name=name, value=modes, reason="not runtime modes", expected=expected
        ) from None


ALL_MODES = mode_bits("all", RuntimeMode)


def class_obstacle(plan: DispatchPlan, entry: PlanEntry, kind: BatchClass) -> Reason | None:
    """Why no batch of the class, with any counts, can use the graph of `entry`, or None."""
    key = entry.descriptor
    if key.uniform_query_len is not None and key.uniform_query_len != kind.query_len:
        return Reason.CAPABILITY
    longest = kind.max_query_len
    if key.max_query_len is not None and (longest is None or longest > key.max_query_len):
        return Reason.CAPABILITY
    for axis, (_, captured), (_, value) in zip(plan.axes, key.axes, kind.axes, strict=True):
        if value > captured or (value < captured and not axis.rounds_up):
            return Reason.AXIS
    if kind.num_loras > key.lora_case:
        return Reason.LORA_CASE_MISSING
    if kind.cascade and entry.mode is RuntimeMode.FULL:
        return Reason.CASCADE
    if not kind.modes >> entry.mode & 1:
        return Reason.EXCLUDED
    return None
