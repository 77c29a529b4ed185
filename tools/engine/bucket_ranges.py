"""The values of each bucket dimension: three strategies, as in engines for Intel Gaudi.

`linear`, `exponential` and `padding_aware` return ascending, distinct values, `low` and `high` too,
and raise InvalidSetting for an invalid range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from ...dispatch import BucketLimits, Phase
from ...errors import InvalidSetting

MOST_PADDING = 25
"""Padding that `padding_aware` accepts, in percent of the next value."""


def linear(low: int, step: int, high: int) -> list[int]:
    """Doublings of `low` below `step`, then multiples of `step`.

    A `low` of 0 continues from `step`.
    """
    _check(low, step, high)
    start = low or step
    values = {low, high}
    ramp = start
    while 0 < ramp < step and ramp <= high:
        values.add(ramp)
        ramp *= 2
    values.update(value for value in range(step, high + 1, step) if value >= start)
    return sorted(values)


def exponential(low: int, step: int, high: int) -> list[int]:
    """A geometric progression with a value for each bit of `high`, rounded up to `step`.

    With a `low` of 0 or 1 the progression starts at `step`.
    """
    _check(low, step, high)
    start = low if low > 1 else step
    last = max(1, math.ceil(math.log2(max(1, high))))
    values = {low, high}
    for i in range(last):
        # same rounding of the exponent as the Gaudi plugin: it decides which powers are hit exactly
        value = start * (high / start) ** (1 / last * i)
        values.add(min(-int(-value // step) * step, high))
    return sorted(values)


def padding_aware(low: int, step: int, high: int) -> list[int]:
    """The multiples of `step`, without those that can be skipped.

    A value is kept if skipping it could pad by more than MOST_PADDING percent or by more than a
    quarter of `high`, or if it is a multiple of that quarter.
    """
    _check(low, step, high)
    most = max(1, -(-high // 4))
    values = [low]
    value = low
    while value <= high:
        last = values[-1]
        if value <= step:
            following = 2 * last or 1
            if following <= high:
                values.append(following)
        else:
            following = value + step
            waste = following - last - 1
            needed = 100 * waste > MOST_PADDING * following or waste > most or value % most == 0
            if needed and value != last:
                values.append(value)
        value = following
    return sorted({*values, high})


def _check(low: int, step: int, high: int) -> None:
    if not 0 <= low <= high or step < 1:
        raise InvalidSetting(
            name="bucket range",
            value=(low, step, high),
            reason="it needs 0 <= low <= high and a step of 1 or more",
            expected="a range that contains buckets",
        )


class BucketStrategy(StrEnum):
    LINEAR = "linear"
    EXPONENTIAL = "exponential"
    PADDING_AWARE = "padding-aware"


_VALUES = {
    BucketStrategy.LINEAR: linear,
    BucketStrategy.EXPONENTIAL: exponential,
    BucketStrategy.PADDING_AWARE: padding_aware,
}


def ranges(
    phase: Phase, limits: BucketLimits, strategy: BucketStrategy
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Numbers of requests, query lengths and blocks of context by `strategy`; raises InvalidSetting
    for contradictory limits."""
    values, block, most = _VALUES[strategy], limits.block_size, limits.max_num_reqs
    if phase is Phase.DECODE:
        reqs = values(1, 32 if strategy is BucketStrategy.LINEAR else 2, most)
        return reqs, (1,), values(1, most, max(1, limits.most_context(phase, most, 1)))
    context = max(1, limits.most_context(phase, 1, block))
    return (
        values(1, 1 if strategy is BucketStrategy.LINEAR else 2, limits.max_prefill_reqs),
        values(block, block, limits.max_num_tokens),
        values(0, 1, context),
    )
