"""Planning the buckets of an engine, and looking up the bucket of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product, starmap

from ...dispatch import Bucket, BucketLimits, Phase
from ...errors import InvalidSetting, NoBuckets


def plan_buckets(phase: Phase, limits: BucketLimits) -> tuple[Bucket, ...]:
    """The buckets that some legal batch may need, corrected, ascending.

    Raises NoBuckets with the rejected buckets if none is left.
    """
    every = list(starmap(Bucket, product(*ranges(phase, limits))))
    kept = {_corrected(bucket, limits) for bucket in every if limits.keeps(bucket)}
    if not kept:
        raise NoBuckets(rejected=", ".join(map(str, map(tuple, every))) or "none")
    return tuple(sorted(kept))


def ranges(
    phase: Phase, limits: BucketLimits
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Numbers of requests, query lengths and blocks of context.

    Raises InvalidSetting for contradictory limits.
    """
    block, most = limits.block_size, limits.max_num_reqs
    if phase is Phase.DECODE:
        context = max(1, limits.most_context(Phase.DECODE, most, 1))
        return exponential(1, 2, most), (1,), exponential(1, most, context)
    return (
        exponential(1, 2, limits.max_prefill_reqs),
        exponential(block, block, limits.max_num_tokens),
        exponential(0, 1, max(1, limits.most_context(Phase.PROMPT, 1, block))),
    )


def exponential(low: int, step: int, high: int) -> list[int]:
    """A geometric progression with a value for each bit of `high`, rounded up to `step`.

    Ascending and distinct, `low` and `high` too. With a `low` of 0 or 1 the progression starts at
    `step`. Raises InvalidSetting for an invalid range.
    """
    if not 0 <= low <= high or step < 1:
        raise InvalidSetting(
            name="bucket range",
            value=(low, step, high),
            reason="it needs 0 <= low <= high and a step of 1 or more",
            expected="a range that contains buckets",
        )
    start = low if low > 1 else step
    last = max(1, math.ceil(math.log2(max(1, high))))
    values = {low, high}
    for i in range(last):
        # same rounding of the exponent as the Gaudi plugin: it decides which powers are hit exactly
        value = start * (high / start) ** (1 / last * i)
        values.add(min(-int(-value // step) * step, high))
    return sorted(values)


def _corrected(bucket: Bucket, limits: BucketLimits) -> Bucket:
    """Queries of prompts are multiples of the chunk size; decode has at most the full context."""
    if bucket.phase is Phase.PROMPT:
        chunk = limits.chunk_size or 1
        return bucket._replace(query=-(-bucket.query // chunk) * chunk)
    most = limits.most_context(Phase.DECODE, bucket.batch, 1)
    return bucket._replace(context=min(bucket.context, most))


def _volume(bucket: Bucket) -> int:
    return bucket.batch * bucket.query * (bucket.context + 1)


def cheapest(
    buckets: Iterable[Bucket], batch: Bucket, cost: Callable[[Bucket], float] = _volume
) -> Bucket | None:
    """The cheapest of `buckets` that holds `batch`, or None.

    `cost` gives the cost of a step from its bucket, in any unit, such as measured seconds. By
    default it is the volume, since all dimensions multiply.
    """
    holding = (bucket for bucket in buckets if bucket.holds(batch))
    return min(holding, key=lambda bucket: (cost(bucket), bucket), default=None)
