"""The bucket of a batch, or the shape of a batch that has none."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from ...errors import BeyondLimits
from .bucket import Bucket, BucketLimits, Phase


def volume(bucket: Bucket) -> int:
    """All dimensions multiply."""
    return bucket.batch * bucket.query * (bucket.context + 1)


class BucketTable:
    """The buckets of an engine, the cheapest first, and the steps that had none.

    `cost` gives the cost of a step from its bucket, in any unit, such as measured seconds.

        table = BucketTable(plan_buckets(Phase.DECODE, limits), limits)
        padded = table.pad(Bucket(batch=3, query=1, context=40))
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        limits: BucketLimits,
        cost: Callable[[Bucket], float] = volume,
    ) -> None:
        self.limits = limits
        self.buckets = tuple(sorted(set(buckets), key=lambda bucket: (cost(bucket), bucket)))
        self.fallbacks: Counter[Bucket] = Counter()
        """Steps without a bucket, by the shape of the batch."""

    def find(self, shape: Bucket) -> Bucket | None:
        """The cheapest bucket of its phase that holds `shape`, or None."""
        fitting = (b for b in self.buckets if b.phase is shape.phase and b.holds(shape))
        return next(fitting, None)

    def pad(self, shape: Bucket) -> Bucket:
        """The bucket of a step, else its fall-back, or `shape` itself where that has more tokens
        than a step may have. Counts fall-backs. Raises BeyondLimits."""
        if (bucket := self.find(shape)) is not None:
            return bucket
        self.fallbacks[shape] += 1
        rounded = self.fallback(shape)
        return rounded if rounded.batch * rounded.query <= self.limits.max_num_tokens else shape

    def fallback(self, shape: Bucket) -> Bucket:
        """`shape` rounded up within the limits, on a grid that grows with the cube root.

        Raises BeyondLimits for a batch that the limits do not allow.
        """
        limits = self.limits
        most, most_query = limits.most_context(shape.phase, shape.batch, 1), limits.max_num_tokens
        if shape.phase is Phase.DECODE:
            # a planned context if one is large enough, else the largest legal one
            planned = max((b.context for b in self.buckets if b.phase is Phase.DECODE), default=0)
            most, most_query = (planned if shape.context <= planned else most), 1
        rounded = Bucket(
            min(rounded_up(shape.batch, 2), limits.max_num_reqs),
            min(rounded_up(shape.query, max(32, limits.chunk_size or 0)), most_query),
            min(rounded_up(shape.context, 32), most),
        )
        if not rounded.holds(shape):
            raise BeyondLimits(shape=tuple(shape), allowed=tuple(rounded))
        return rounded


def rounded_up(value: int, base: int) -> int:
    """`value` rounded up to a multiple of `base` times its cube root, itself rounded up."""
    if value <= 1:
        return value
    root = round(math.cbrt(value))
    root += root**3 < value
    return -(-value // (root * base)) * root * base
