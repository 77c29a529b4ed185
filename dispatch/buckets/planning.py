"""Buckets: the padded shapes an engine warms, combined from one range for each dimension."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from ...errors import InvalidSetting, NoBuckets
from .coverage import close_holes
from .defaults import BucketRanges, BucketStrategy, default_ranges
from .limits import LONG_CONTEXT, Bucket, BucketLimits, Phase


def plan_buckets(
    phase: Phase,
    limits: BucketLimits,
    strategy: BucketStrategy = BucketStrategy.EXPONENTIAL,
    *,
    ranges: BucketRanges | None = None,
    covering: bool = False,
) -> tuple[Bucket, ...]:
    """All combinations of the ranges that are worth having, corrected, ascending.

    `covering` adds the buckets that close the holes which filters and ranges leave. Raises
    NoBuckets, naming what was rejected, if nothing is left.
    """
    ranges = ranges or default_ranges(phase, limits, strategy)
    every = _prompts(limits, ranges) if phase is Phase.PROMPT else _decodes(limits, ranges)
    buckets = filter_buckets(every, limits)
    return close_holes(phase, limits, buckets) if covering else buckets


def filter_buckets(every: Iterable[Bucket], limits: BucketLimits) -> tuple[Bucket, ...]:
    """The buckets that `limits` keeps, corrected, ascending; raises NoBuckets if none is."""
    every = list(every)
    kept = {_corrected(bucket, limits) for bucket in every if limits.keeps(bucket)}
    if not kept:
        raise NoBuckets(rejected=", ".join(map(str, map(tuple, every))) or "nothing was asked for")
    return tuple(sorted(kept))


def with_drafts(buckets: Iterable[Bucket], limits: BucketLimits, drafts: int) -> tuple[Bucket, ...]:
    """Decode buckets for `drafts` speculative tokens a request, which run as further requests."""
    width = 1 + drafts
    wide = [
        bucket._replace(batch=bucket.batch * width, context=context)
        for bucket in buckets
        for context in (bucket.context, bucket.context * width)
        if context > bucket.context or bucket.batch * width <= context
    ]
    return tuple(sorted({_corrected(bucket, limits) for bucket in wide}))


def _prompts(limits: BucketLimits, ranges: BucketRanges) -> Iterable[Bucket]:
    chunk = limits.chunk_size or 1
    if limits.max_num_tokens % chunk:
        raise InvalidSetting(
            name="chunk_size",
            value=chunk,
            reason=f"max_num_tokens {limits.max_num_tokens} is no multiple of it",
            expected="a divisor of max_num_tokens",
        )
    last = max(ranges.context)
    for batch, context, query in product(ranges.batch, ranges.context, ranges.query):
        query = -(-query // chunk) * chunk
        edge = (limits.max_model_len - query) // limits.block_size
        if limits.max_model_len >= LONG_CONTEXT and context == last and 0 <= edge < last:
            yield Bucket(batch, query, edge)
        else:
            yield Bucket(batch, query, context)


def _decodes(limits: BucketLimits, ranges: BucketRanges) -> Iterable[Bucket]:
    contexts = [*ranges.context]
    if limits.contiguous and limits.total_blocks and contexts[-1] < limits.total_blocks:
        contexts.append(limits.total_blocks)
    return (Bucket(batch, 1, context) for batch, context in product(ranges.batch, contexts))


def _corrected(bucket: Bucket, limits: BucketLimits) -> Bucket:
    """No decode batch has more context than its requests' full lengths."""
    if bucket.phase is Phase.PROMPT or limits.contiguous:
        return bucket
    return bucket._replace(context=min(bucket.context, bucket.batch * limits.request_blocks))
