"""One plan for a model with several traces, each of which serves an interval of token counts or a
call form.

It is the plan of the largest interval with a symbol of the token count, for the whole range: inputs
are bound and results returned by it. The others are in it, and a step runs the one of its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import IntervalsDiffer
from ..ir.config import TOKENS
from ..ir.plan import Plan, Weight, evaluated


def join_plans(plans: Sequence[Plan], intervals: Sequence[tuple[int, int]]) -> Plan:
    """The plan of all `plans`, which serve `intervals`, ascending.

    Raises IntervalsDiffer unless all have the same inputs and results of the same form.
    """
    if len(plans) == 1:
        return plans[0]
    at = max(n for n, plan in enumerate(plans) if any(s.label == TOKENS for s in plan.symbols))
    main, others = plans[at], [*plans[:at], *plans[at + 1 :]]
    for plan, (low, high) in zip(plans, intervals, strict=True):
        for part, change in _differences(main, plan, low, high):
            raise IntervalsDiffer(low=low, high=high, part=part, change=change)
    written = {item.path for plan in plans for item in plan.inputs if item.written}
    low, high = intervals[0][0], intervals[-1][1]
    return main.model_copy(
        update={
            "inputs": tuple(
                item.model_copy(update={"written": item.path in written}) for item in main.inputs
            ),
            "weights": _weights(main, others),
            "symbols": tuple(
                s.model_copy(update={"low": low, "high": high}) if s.label == TOKENS else s
                for s in main.symbols
            ),
            "others": tuple(others),
        }
    )


def join_forms(plans: Sequence[Plan]) -> Plan:
    """The plan of a model with one for each call form: that of the first has the others in it."""
    if len(plans) == 1:
        return plans[0]
    main, *others = plans
    return main.model_copy(update={"weights": _weights(main, others), "forms": tuple(others)})


def _weights(main: Plan, others: Sequence[Plan]) -> tuple[Weight, ...]:
    """All weights that the plans read; those of `main` keep their names."""
    found = {weight.target: weight for weight in main.weights}
    for weight in (weight for plan in others for weight in plan.weights):
        named = weight.model_copy(update={"name": f"w{len(found)}"})
        known = found.setdefault(weight.target, named)
        written = known.written or weight.written
        found[weight.target] = known.model_copy(update={"written": written})
    return tuple(found.values())


def _differences(main: Plan, plan: Plan, low: int, high: int) -> Any:
    """Pairs of a part that differs for the caller of a step, and how."""
    if missing := [i.label for i in plan.inputs if all(i.path != m.path for m in main.inputs)]:
        yield "inputs", f"{missing[0]!r} is read by these sizes only"
    if plan.structure != main.structure:
        yield "results", f"{plan.structure} instead of {main.structure}"
    for size in (low, high):
        if (forms := _forms(plan, size)) != (expected := _forms(main, size)):
            yield "results", f"{forms} instead of {expected}"


def _forms(plan: Plan, num_tokens: int) -> list[Any]:
    """Dtype and shape of each result at a number of tokens, other sizes at their least."""
    least = {s.name: num_tokens if s.label == TOKENS else s.low for s in plan.symbols}
    return [
        (result.dtype, [evaluated(dim, least) for dim in result.shape])
        if result.dtype
        else evaluated(result.name, least)
        for result in plan.results
    ]
