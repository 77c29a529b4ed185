"""Looking up a bucket: the one that pads least, or a new one where none was planned."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...errors import BeyondLimits
from .limits import Bucket, BucketLimits, Phase


class BucketTable:
    """The buckets of one phase, cheapest first, with what to do where they have a hole."""

    def __init__(self, buckets: Iterable[Bucket], limits: BucketLimits) -> None:
        self.limits = limits
        self.buckets = tuple(sorted(set(buckets), key=lambda bucket: (_volume(bucket), bucket)))

    def find(self, batch: int, query: int, context: int) -> Bucket | None:
        """The planned bucket with the least padding in all dimensions taken together.

        All of them multiply, so the bucket whose padded shape has the least volume pads least.
        """
        wanted = Bucket(batch, query, context)
        return next((bucket for bucket in self.buckets if bucket.holds(wanted)), None)

    def fallback(self, phase: Phase, batch: int, query: int, context: int) -> Bucket:
        """A bucket for a batch that none was planned for; running it compiles.

        Each component is rounded up on a grid that coarsens with its cube root, within the
        limits. Raises BeyondLimits for a batch that no limit allows.
        """
        limits = self.limits
        most, most_query = limits.most_context(phase, batch, 1), limits.max_num_tokens
        if phase is Phase.DECODE:
            # a context that was warmed, or for what is above all of them what there can be
            warmed = max((bucket.context for bucket in self.buckets), default=0)
            most, most_query = (warmed if context <= warmed else most), 1
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
