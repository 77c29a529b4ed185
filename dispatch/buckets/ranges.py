"""The buckets of a strategy: the values of each dimension, and their combinations.

Strategies, defaults and filters are those of vLLM on Gaudi.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from itertools import product, starmap
from types import MappingProxyType

from ...errors import InvalidSetting, NoBuckets
from .bucket import Bucket, BucketLimits, Phase

NONE: Mapping[str, int] = MappingProxyType({})

LONG_CONTEXT = 8192
"""From this model length on, the largest context leaves room for the longest query."""


class BucketStrategy(StrEnum):
    """How the values of a dimension are spaced: by a factor, by a step, or by limits on padding."""

    EXPONENTIAL = "exponential"
    LINEAR = "linear"
    PADDING_AWARE = "padding-aware"


@dataclass(frozen=True, slots=True)
class BucketRange:
    """The parameters of one dimension, in requests, tokens or blocks.

    `limit` is the most values of `exponential`, beside a `min` of 0 or 1. `pad_max` (0: `max`) and
    `pad_percent` limit the padding of `padding-aware`, in units and in percent of the larger value.
    """

    min: int
    step: int
    max: int
    limit: int = 1
    pad_max: int = 0
    pad_percent: int = 25


PARAMETERS = tuple(
    f"{phase}.{dimension}.{each.name}"
    for phase in Phase
    for dimension in Bucket._fields
    if (phase, dimension) != (Phase.DECODE, "query")
    for each in fields(BucketRange)
)
"""The names of all parameters, such as `prompt.query.max`. In decode the query length is 1."""


def linear(of: BucketRange) -> list[int]:
    """Doublings of `min` below `step`, then multiples of `step` up to `max`.

    `max` is a value only if it is a multiple. A `min` of 0 gives 0 and continues from `step`.
    """
    start = of.min or of.step
    values = {0} if of.min == 0 else set()
    ramp = start
    while 0 < ramp < of.step and ramp <= of.max:
        values.add(ramp)
        ramp *= 2
    values.update(value for value in range(of.step, of.max + 1, of.step) if value >= start)
    return sorted(values)


def exponential(of: BucketRange) -> list[int]:
    """`limit` values in geometric progression from `min` to `max`, rounded up to `step`.

    A `min` of 0 or 1 is a value of its own, and the progression starts at `step`.
    """
    if of.limit == 1:
        return [of.max]
    start = of.min if of.min > 1 else of.step
    values = set() if of.min > 1 else {of.min}
    for i in range(of.limit):
        # same rounding of the exponent as the Gaudi plugin: it decides which powers are hit exactly
        value = start * (of.max / start) ** (1 / (of.limit - 1) * i)
        values.add(min(-int(-value // of.step) * of.step, of.max))
    return sorted(values)


def padding_aware(of: BucketRange) -> list[int]:
    """The multiples of `step`, without those that can be skipped, and `max`.

    A value is kept if skipping it would break a limit on padding, or if it is a multiple of
    `pad_max`.
    """
    most = of.pad_max or of.max
    values = [of.min]
    value = of.min
    while value <= of.max:
        last = values[-1]
        if value <= of.step:
            following = 2 * last or 1
            if following <= of.max:
                values.append(following)
        else:
            following = value + of.step
            waste = following - last - 1
            padded = 100 * waste > of.pad_percent * following or waste > most
            if value != last and (padded or value % most == 0):
                values.append(value)
        value = following
    return sorted({*values, of.max})


_VALUES: dict[BucketStrategy, Callable[[BucketRange], list[int]]] = {
    BucketStrategy.EXPONENTIAL: exponential,
    BucketStrategy.LINEAR: linear,
    BucketStrategy.PADDING_AWARE: padding_aware,
}


def range_values(name: str, strategy: BucketStrategy, of: BucketRange) -> list[int]:
    """The values of the dimension `name`, ascending and distinct.

    Raises InvalidSetting for a range without values.
    """
    if not 0 <= of.min <= of.max or of.step < 1 or of.limit < 1:
        reason = "it needs 0 <= min <= max, and a step and a limit of 1 or more"
    elif of.pad_max < 0 or not 0 <= of.pad_percent <= 50:
        reason = "a limit on padding is negative, or above 50 percent"
    else:
        return _VALUES[strategy](of)
    raise InvalidSetting(name=name, value=of, reason=reason, expected="a range that has buckets")


def check_parameters(parameters: Mapping[str, int]) -> None:
    """Raise InvalidSetting for a name that is not one of PARAMETERS."""
    for name in parameters.keys() - set(PARAMETERS):
        near = get_close_matches(name, PARAMETERS, 1, 0)[0]
        raise InvalidSetting(
            name=name,
            value=parameters[name],
            reason=f"buckets have no such parameter (did you mean {near}?)",
            expected="PHASE.DIMENSION.PARAMETER, as in prompt.query.max",
        )


def bucket_ranges(
    phase: Phase, limits: BucketLimits, strategy: BucketStrategy, parameters: Mapping[str, int]
) -> dict[str, BucketRange]:
    """The range of each dimension of `phase`: the `parameters` given by name, else by the limits.

    Raises InvalidSetting for an unknown name.

        bucket_ranges(Phase.PROMPT, limits, BucketStrategy.LINEAR, {"prompt.query.max": 1024})
    """
    check_parameters(parameters)
    own: dict[str, dict[str, int]] = {dimension: {} for dimension in Bucket._fields}
    for name, value in parameters.items():
        of_phase, dimension, parameter = name.split(".")
        if of_phase == phase:
            own[dimension][parameter] = value
    return (_decode if phase is Phase.DECODE else _prompt)(limits, strategy, own)


def _prompt(
    limits: BucketLimits, strategy: BucketStrategy, own: Mapping[str, Mapping[str, int]]
) -> dict[str, BucketRange]:
    block, tokens, reqs = limits.block_size, limits.max_num_tokens, limits.max_prefill_reqs
    exponential = strategy is BucketStrategy.EXPONENTIAL
    aware = strategy is BucketStrategy.PADDING_AWARE
    merged = limits.merged_prefill
    low, step = min(block, tokens), 4 * block if merged else block
    query = _range(own["query"], low, step, tokens, lambda high: _log2(high) or 1)
    long = exponential and limits.max_model_len >= LONG_CONTEXT
    rest = limits.max_model_len - (tokens if long else query.min)
    most = max(1 if exponential else 0, limits.blocks(rest) if aware else rest // block)
    step = 2 if aware else 1
    if merged:  # one row holds the prompts and contexts of several requests
        step, most = 4, most * reqs
    return {
        "batch": _range(own["batch"], 1, 2 if exponential else 1, 1 if merged else reqs),
        "query": query,
        "context": _range(
            own["context"],
            0,
            step,
            most,
            lambda high: max(2, _log2(high) + 1),
            limits.blocks(tokens),
        ),
    }


def _decode(
    limits: BucketLimits, strategy: BucketStrategy, own: Mapping[str, Mapping[str, int]]
) -> dict[str, BucketRange]:
    block, reqs, total = limits.block_size, limits.max_num_reqs, limits.total_blocks
    tokens, cap = limits.max_model_len * reqs, None
    low, step, most = {
        BucketStrategy.EXPONENTIAL: (1, reqs, limits.request_blocks * reqs),
        BucketStrategy.LINEAR: (1, block, max(tokens // block, block)),
        BucketStrategy.PADDING_AWARE: (block, block, max(limits.blocks(tokens), block)),
    }[strategy]
    exponential = strategy is BucketStrategy.EXPONENTIAL
    if total and limits.contiguous:
        most, cap = min(most, total) if exponential else total, total
    elif total and limits.clamped and exponential:
        most = min(most, 3 * total)

    def limit(high: int) -> int:
        beyond = -(-high // (3 * total)) if total else 1
        return _log2(high) + 1 + (_log2(beyond) + 1 if beyond > 1 else 0)

    return {
        "batch": _range(own["batch"], 1, 32 if strategy is BucketStrategy.LINEAR else 2, reqs),
        "query": BucketRange(1, 1, 1),
        "context": _range(own["context"], low, step, most, limit, cap=cap),
    }


def _range(
    own: Mapping[str, int],
    low: int,
    step: int,
    high: int,
    limit: Callable[[int], int] = lambda high: _log2(high) + 1,
    pad_max: int | None = None,
    cap: int | None = None,
) -> BucketRange:
    """A range with its `own` parameters, and the others from these; `max` is at most `cap`."""
    low, step, high = own.get("min", low), own.get("step", step), own.get("max", high)
    if cap is not None and (high := min(high, cap)) < low:
        low = max(1, high - step)
    return BucketRange(
        low,
        step,
        high,
        own.get("limit", limit(high)),
        own.get("pad_max", -(-high // 4) if pad_max is None else pad_max),
        own.get("pad_percent", 25),
    )


def _log2(value: int) -> int:
    """The logarithm, rounded up; 0 below 1."""
    return max(0, value - 1).bit_length()


def plan_buckets(
    phase: Phase,
    limits: BucketLimits,
    strategy: BucketStrategy = BucketStrategy.EXPONENTIAL,
    parameters: Mapping[str, int] = NONE,
) -> tuple[Bucket, ...]:
    """The buckets of `strategy` that some legal batch may need, ascending.

    `parameters` are of PARAMETERS; the limits decide the others. Raises InvalidSetting for a range
    without values, and NoBuckets if the limits exclude every bucket.

        plan_buckets(Phase.DECODE, BucketLimits(128, 2048, 4096, max_num_reqs=64))
    """
    ranges = bucket_ranges(phase, limits, strategy, parameters)
    batches, queries, contexts = (
        range_values(f"{phase}.{name}", strategy, of) for name, of in ranges.items()
    )
    if phase is Phase.DECODE:
        if limits.contiguous and limits.total_blocks and contexts[-1] < limits.total_blocks:
            contexts.append(limits.total_blocks)
        return filter_buckets(starmap(Bucket, product(batches, queries, contexts)), limits)
    chunk = limits.chunk_size or 1
    if limits.max_num_tokens % chunk:
        raise InvalidSetting(
            name="chunk_size",
            value=chunk,
            reason=f"max_num_tokens {limits.max_num_tokens} is no multiple of it",
            expected="a divisor of max_num_tokens",
        )
    queries = [-(-query // chunk) * chunk for query in queries]
    most = parameters.get("prompt.context.max", limits.request_blocks)

    def context_of(query: int, context: int) -> int:
        """The largest context of a long model is what `query` leaves of its length."""
        room = (limits.max_model_len - query) // limits.block_size
        is_edge = limits.max_model_len >= LONG_CONTEXT and context == contexts[-1]
        return room if is_edge and 0 <= room < most else context

    every = (Bucket(b, q, context_of(q, c)) for b, q, c in product(batches, queries, contexts))
    return filter_buckets((bucket for bucket in every if bucket.phase is phase), limits)


def setting_for(
    shape: Bucket,
    limits: BucketLimits,
    strategy: BucketStrategy = BucketStrategy.EXPONENTIAL,
    parameters: Mapping[str, int] = NONE,
) -> str:
    """The setting that is too small for the plan to have a bucket for `shape`: a parameter, or a
    limit that excludes all that would hold it."""
    least = []
    for value, (name, of) in zip(
        shape, bucket_ranges(shape.phase, limits, strategy, parameters).items(), strict=True
    ):
        above = [each for each in range_values(name, strategy, of) if each >= value]
        if not above:
            return f"{shape.phase}.{name}.max"
        least.append(above[0])
    return "max_num_tokens" if least[0] * least[1] > limits.max_num_tokens else "max_model_len"


def filter_buckets(buckets: Iterable[Bucket], limits: BucketLimits) -> tuple[Bucket, ...]:
    """The `buckets` that `limits` keep, ascending: a decode context is at most that of its requests
    at full length. Raises NoBuckets, with what was rejected, if none is left.
    """
    every = list(buckets)
    kept = {_corrected(bucket, limits) for bucket in every if limits.keeps(bucket)}
    if not kept:
        raise NoBuckets(rejected=", ".join(map(str, map(tuple, every))) or "none")
    return tuple(sorted(kept))


def _corrected(bucket: Bucket, limits: BucketLimits) -> Bucket:
    if bucket.phase is Phase.PROMPT or limits.contiguous:
        return bucket
    return bucket._replace(context=min(bucket.context, bucket.batch * limits.request_blocks))
