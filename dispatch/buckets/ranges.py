"""The three ways to lay buckets along one dimension, as HPU engines do it.

Each returns ascending, distinct values; each raises InvalidSetting for a range that cannot be.
"""

from __future__ import annotations

from ...errors import InvalidSetting


def linear(low: int, step: int, high: int) -> list[int]:
    """Doublings of `low` below `step`, then multiples of `step` up to `high`.

    `high` is a value only if it is a multiple. A `low` of 0 gives 0 and goes on from `step`.
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

    A `low` of 0 or 1 is kept as it is and the progression starts at `step`. No value passes
    `high`; with `exact` the last is `high` itself, multiple or not.
    """
    _check(low, step, high)
    if count < 1:
        raise _bad(count, "the number of buckets is below 1")
    if count == 1:
        return [high]
    start = low if low > 1 else step
    values = set() if low > 1 else {low}
    for i in range(count):
        # the exponent is rounded as in the reference: it decides which exact powers are met
        value = start * (high / start) ** (1 / (count - 1) * i)
        rounded = -int(-value // step) * step
        values.add(high if exact and i == count - 1 else min(rounded, high))
    return sorted(values)


def padding_aware(low: int, step: int, high: int, most: int, percent: int) -> list[int]:
    """The multiples of `step` without those that can be left out.

    A value stays if skipping it could pad by more than `most` (0: `high`) or by more than
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
    expected = "a range with room for buckets"
    return InvalidSetting(name="bucket range", value=value, reason=reason, expected=expected)
