"""Coverage: proof that every legal batch has a bucket, or a list of holes that can be closed.

The values of the buckets divide the region of legal batches into cells. All batches of a cell fit
into the same buckets, so it is enough to check one batch of each cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from typing import NamedTuple

from .bucket import Bucket, BucketLimits, Phase


class Hole(NamedTuple):
    """A cell without a bucket: its smallest legal batch, and the maximum of each component."""

    first: Bucket
    last: Bucket


def find_holes(phase: Phase, limits: BucketLimits, buckets: Iterable[Bucket]) -> tuple[Hole, ...]:
    """All cells of legal batches without a bucket; an empty result proves coverage."""
    return tuple(Hole(*cell) for cell in _open_cells(phase, limits, set(buckets)))


def close_holes(
    phase: Phase, limits: BucketLimits, buckets: Iterable[Bucket]
) -> tuple[Bucket, ...]:
    """`buckets` plus those that close every hole, ascending.

    The added ones are within the token budget, except that queries are rounded to the chunk size.
    """
    closed = set(buckets)
    for first, last in _open_cells(phase, limits, set(closed)):
        closed.update(_tops(phase, limits, first, last))
    return tuple(sorted(closed))


def _open_cells(
    phase: Phase, limits: BucketLimits, buckets: set[Bucket]
) -> Iterator[tuple[Bucket, Bucket]]:
    most = _most(phase, limits)
    cuts = [
        sorted({low, top, *(min(value, top) for value in values)})
        for low, top, values in zip(
            (0, 0, -1), most, zip(*buckets, strict=True) if buckets else ((), (), ()), strict=True
        )
    ]
    reach = _reach(cuts[0], cuts[1], buckets)
    for cell in product(*(pairwise(values) for values in cuts)):
        (_, batch), (_, query), (_, context) = cell
        least = Bucket(*(low + 1 for low, _ in cell))
        if context <= reach[batch, query]:
            continue
        first = _first_legal(phase, limits, least)
        last = Bucket(batch, query, context)
        if last.holds(first) and _legal(phase, limits, first):
            yield first, last


def _reach(
    batches: list[int], queries: list[int], buckets: set[Bucket]
) -> dict[tuple[int, int], int]:
    """For each (batch, query) the largest context of a bucket at least as large in both."""
    reach: dict[tuple[int, int], int] = {}
    for bucket in buckets:
        corner = min(bucket.batch, batches[-1]), min(bucket.query, queries[-1])
        reach[corner] = max(bucket.context, reach.get(corner, -1))
    rows = zip(reversed(batches), [0, *reversed(batches)], strict=False)
    columns = list(zip(reversed(queries), [0, *reversed(queries)], strict=False))
    for (batch, more), (query, longer) in product(rows, columns):
        corners = (batch, query), (more, query), (batch, longer)
        reach[batch, query] = max(reach.get(corner, -1) for corner in corners)
    return reach


def _most(phase: Phase, limits: BucketLimits) -> Bucket:
    """The maximum of each component over all legal batches."""
    if phase is Phase.DECODE:
        batch = min(limits.max_num_reqs, limits.max_num_tokens)
        return Bucket(batch, 1, limits.most_context(phase, batch, 1))
    batch = min(limits.max_num_reqs, limits.max_prefill_reqs)
    query = min(limits.max_model_len, limits.max_num_tokens)
    return Bucket(batch, query, limits.most_context(phase, 1, 1))


def _legal(phase: Phase, limits: BucketLimits, shape: Bucket) -> bool:
    if shape.context > limits.most_context(phase, shape.batch, shape.query):
        return False
    if phase is Phase.DECODE:
        return limits.keeps(shape)
    return shape.batch * shape.query <= limits.max_num_tokens


def _first_legal(phase: Phase, limits: BucketLimits, least: Bucket) -> Bucket:
    """The smallest batch from `least` on that can be legal; decode needs a block per request."""
    if phase is Phase.PROMPT or limits.contiguous:
        return least
    batch = max(least.batch, -(-least.context // limits.request_blocks))
    return Bucket(batch, 1, max(least.context, batch))


def _tops(phase: Phase, limits: BucketLimits, first: Bucket, last: Bucket) -> Iterator[Bucket]:
    """The fewest shapes that cover every legal batch of one cell."""
    if phase is Phase.DECODE:
        batch = last.batch if limits.contiguous else min(last.batch, last.context)
        yield Bucket(batch, 1, min(last.context, limits.most_context(phase, batch, 1)))
        return
    context = min(last.context, limits.most_context(phase, 1, first.query))
    chunk, shorter = limits.chunk_size or 1, 0
    for batch in range(last.batch, first.batch - 1, -1):
        query = min(last.query, limits.max_num_tokens // batch)
        if query >= first.query and query > shorter:
            yield Bucket(batch, -(-query // chunk) * chunk, context)
            shorter = query
