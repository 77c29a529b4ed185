"""Planning the buckets of an engine, and looking up the bucket of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import product, starmap

from ...dispatch import Bucket, BucketLimits, Phase
from ...errors import BeyondLimits, NoBuckets
from .bucket_ranges import BucketStrategy, ranges


def plan_buckets(
    phase: Phase,
    limits: BucketLimits,
    strategy: BucketStrategy = BucketStrategy.EXPONENTIAL,
) -> tuple[Bucket, ...]:
    """The buckets of a strategy that some legal batch may need, corrected, ascending.

    Raises NoBuckets with the rejected buckets if none is left.
    """
    return filter_buckets(starmap(Bucket, product(*ranges(phase, limits, strategy))), limits)


def filter_buckets(every: Iterable[Bucket], limits: BucketLimits) -> tuple[Bucket, ...]:
    """The buckets that `limits` keeps, corrected, ascending; raises NoBuckets if there is none."""
    every = list(every)
    kept = {_corrected(bucket, limits) for bucket in every if limits.keeps(bucket)}
    if not kept:
        raise NoBuckets(rejected=", ".join(map(str, map(tuple, every))) or "none")
    return tuple(sorted(kept))


def _corrected(bucket: Bucket, limits: BucketLimits) -> Bucket:
    """Queries of prompts are multiples of the chunk size; decode has at most the full context."""
    if bucket.phase is Phase.PROMPT:
        chunk = limits.chunk_size or 1
        return bucket._replace(query=-(-bucket.query // chunk) * chunk)
    most = limits.most_context(Phase.DECODE, bucket.batch, 1)
    return bucket._replace(context=min(bucket.context, most))


class BucketTable:
    """The buckets of one phase, cheapest first, with a fallback for holes.

    `cost` gives the cost of a step from its bucket, in any unit, such as measured seconds. Without
    it the bucket with the smallest volume is the cheapest, since all dimensions multiply.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        limits: BucketLimits,
        cost: Callable[[Bucket], float] | None = None,
    ) -> None:
        self.limits = limits
        price = cost or _volume
        self.buckets = tuple(sorted(set(buckets), key=lambda bucket: (price(bucket), bucket)))

    def find(self, batch: int, query: int, context: int) -> Bucket | None:
        """The cheapest planned bucket that holds the batch, or None."""
        wanted = Bucket(batch, query, context)
        return next((bucket for bucket in self.buckets if bucket.holds(wanted)), None)

    def fallback(self, phase: Phase, batch: int, query: int, context: int) -> Bucket:
        """A bucket for a batch without a planned one; running it compiles.

        Each component is rounded up, within the limits, on a grid whose step grows with its cube
        root. Raises BeyondLimits for a batch that the limits do not allow.
        """
        limits = self.limits
        most, most_query = limits.most_context(phase, batch, 1), limits.max_num_tokens
        if phase is Phase.DECODE:
            # a planned context if one is large enough, else the largest legal one
            planned = max((bucket.context for bucket in self.buckets), default=0)
            most, most_query = (planned if context <= planned else most), 1
        bucket = Bucket(
            min(coarse(batch, 2), limits.max_num_reqs),
            min(coarse(query, max(32, limits.chunk_size or 0)), most_query),
            min(coarse(context, 32), most),
        )
        if not bucket.holds(wanted := Bucket(batch, query, context)):
            raise BeyondLimits(shape=tuple(wanted), allowed=tuple(bucket))
        return bucket


def coarse(value: int, base: int) -> int:
    """`value` rounded up to a multiple of `base` times its cube root, itself rounded up."""
    if value <= 1:
        return value
    root = round(math.cbrt(value))
    root += root * root * root < value
    return -(-value // (root * base)) * root * base


def _volume(bucket: Bucket) -> int:
    return bucket.batch * bucket.query * (bucket.context + 1)
