"""The values of each bucket dimension: three strategies, as in engines for Intel Gaudi.

`linear`, `exponential` and `padding_aware` return ascending, distinct values and raise
InvalidSetting for an invalid range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...dispatch import BucketLimits, Phase
from ...errors import InvalidSetting

LONG_CONTEXT = 8192
"""From this model length on, the largest context is reduced by the length of the query."""


def linear(low: int, step: int, high: int) -> list[int]:
    """Doublings of `low` below `step`, then multiples of `step` up to `high`.

    `high` is a value only if it is a multiple. A `low` of 0 gives 0 and continues from `step`.
    """
    _check(low, step, high)
    start = low or step
    values = {0} if low == 0 else set()
    ramp = start
    while 0 < ramp < step and ramp <= high:
        values.add(ramp)
        ramp *= 2
    values.update(value for value in range(step, high + 1, step) if value >= start)
    return sorted(values)


def exponential(low: int, step: int, high: int, count: int, *, exact: bool = False) -> list[int]:
    """`count` values in geometric progression from `low` to `high`, rounded up to `step`.

    A `low` of 0 or 1 is kept as it is and the progression starts at `step`. No value is above
    `high`; with `exact` the last is `high` itself, even if it is no multiple.
    """
    _check(low, step, high)
    if count < 1:
        raise _bad(count, "the number of buckets is below 1")
    if count == 1:
        return [high]
    start = low if low > 1 else step
    values = set() if low > 1 else {low}
    for i in range(count):
        # same rounding of the exponent as the Gaudi plugin: it decides which powers are hit exactly
        value = start * (high / start) ** (1 / (count - 1) * i)
        rounded = -int(-value // step) * step
        values.add(high if exact and i == count - 1 else min(rounded, high))
    return sorted(values)


def padding_aware(low: int, step: int, high: int, most: int, percent: int) -> list[int]:
    """The multiples of `step`, without those that can be skipped.

    A value is kept if skipping it could pad by more than `most` (0: `high`) or by more than
    `percent` of the next value, or if it is a multiple of `most`. `high` is always a value.
    """
    _check(low, step, high)
    if not 0 <= percent <= 50 or most < 0:
        raise _bad((most, percent), "a padding limit is negative or above 50 percent")
    most = most or high
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
            needed = 100 * waste > percent * following or waste > most or value % most == 0
            if needed and value != last:
                values.append(value)
        value = following
    return sorted({*values, high})


def _check(low: int, step: int, high: int) -> None:
    if not 0 <= low <= high or step < 1:
        raise _bad((low, step, high), "it needs 0 <= low <= high and a step of 1 or more")


def _bad(value: object, reason: str) -> InvalidSetting:
    expected = "a range that contains buckets"
    return InvalidSetting(name="bucket range", value=value, reason=reason, expected=expected)


class BucketStrategy(StrEnum):
    LINEAR = "linear"
    EXPONENTIAL = "exponential"
    PADDING_AWARE = "padding-aware"


@dataclass(frozen=True, slots=True)
class BucketRanges:
    """The values of each dimension. In decode the query length is 1."""

    batch: Sequence[int]
    query: Sequence[int]
    context: Sequence[int]


def default_ranges(phase: Phase, limits: BucketLimits, strategy: BucketStrategy) -> BucketRanges:
    """The ranges of `strategy` for `phase`; raises InvalidSetting for contradictory limits."""
    if phase is Phase.DECODE:
        batch, context = _DECODE[strategy](limits)
        return BucketRanges(batch, (1,), context)
    return _PROMPT[strategy](limits)


def _linear_prompt(limits: BucketLimits) -> BucketRanges:
    block, tokens = limits.block_size, limits.max_num_tokens
    context = (limits.max_model_len - block) // block
    if limits.merged_prefill:
        merged = linear(0, 4, context * limits.max_prefill_reqs)
        return BucketRanges(linear(1, 1, 1), linear(block, 4 * block, tokens), merged)
    batch = linear(1, 1, limits.max_prefill_reqs)
    return BucketRanges(batch, linear(block, block, tokens), linear(0, 1, context))


def _linear_decode(limits: BucketLimits) -> tuple[list[int], list[int]]:
    block = limits.block_size
    low, high = 1, max(limits.max_model_len * limits.max_num_reqs // block, block)
    if limits.contiguous and limits.total_blocks:
        high = limits.total_blocks
    return linear(1, 32, limits.max_num_reqs), linear(low, block, high)


def _exponential_prompt(limits: BucketLimits) -> BucketRanges:
    block, tokens, reqs = limits.block_size, limits.max_num_tokens, limits.max_prefill_reqs
    held_back = tokens if limits.max_model_len >= LONG_CONTEXT else block
    context = max(1, (limits.max_model_len - held_back) // block)
    points = 2 if context == 1 else _log2(context) + 1
    return BucketRanges(
        exponential(1, 2, reqs, _log2(reqs) + 1),
        exponential(block, block, tokens, max(1, _log2(tokens))),
        exponential(0, 1, context, points),
    )


def _exponential_decode(limits: BucketLimits) -> tuple[list[int], list[int]]:
    reqs, total = limits.max_num_reqs, limits.total_blocks
    high = limits.request_blocks * reqs
    extra = 0
    if total and limits.contiguous:
        high = min(high, total)
    elif total and limits.clamped:
        high = min(high, 3 * total)
    elif total and high > 3 * total:
        extra = _log2(high / (3 * total)) + 1
    points = _log2(high) + 1 + extra
    batch = exponential(1, 2, reqs, _log2(reqs) + 1)
    return batch, exponential(1, reqs, high, points, exact=limits.contiguous)


def _padded_prompt(limits: BucketLimits) -> BucketRanges:
    block, tokens, reqs = limits.block_size, limits.max_num_tokens, limits.max_prefill_reqs
    context = limits.blocks(limits.max_model_len - block)
    return BucketRanges(
        padding_aware(1, 1, reqs, _quarter(reqs), 25),
        padding_aware(block, block, tokens, _quarter(tokens), 25),
        padding_aware(0, 2, context, limits.blocks(tokens), 25),
    )


def _padded_decode(limits: BucketLimits) -> tuple[list[int], list[int]]:
    block, reqs, total = limits.block_size, limits.max_num_reqs, limits.total_blocks
    low, high = block, max(limits.blocks(limits.max_model_len * reqs), block)
    if limits.contiguous and total:
        high = total
        low = low if low <= total else max(1, total - block)
    batch = padding_aware(1, 2, reqs, _quarter(reqs), 25)
    return batch, padding_aware(low, block, high, _quarter(high), 25)


def _log2(value: float) -> int:
    return math.ceil(math.log2(value))


def _quarter(value: int) -> int:
    return -(-value // 4)


_PROMPT = {
    BucketStrategy.LINEAR: _linear_prompt,
    BucketStrategy.EXPONENTIAL: _exponential_prompt,
    BucketStrategy.PADDING_AWARE: _padded_prompt,
}
_DECODE = {
    BucketStrategy.LINEAR: _linear_decode,
    BucketStrategy.EXPONENTIAL: _exponential_decode,
    BucketStrategy.PADDING_AWARE: _padded_decode,
}
