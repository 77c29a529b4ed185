"""Capture sizes: the default sizes, checks of a user's list, alignment.

The default sizes are vLLM's (1, 2, 4, every 8 to 256, every 16 above), extended so that the
largest possible decode batch is always a size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import CaptureSizeInvalid, InvalidSetting

DENSE_END = 512
"""The last default size for batches that are not decode."""


@dataclass(frozen=True, slots=True)
class DecodeTier:
    """Decode batches of one query length, up to `max_num_reqs` requests."""

    query_len: int
    max_num_reqs: int


def decode_tiers(schedule: Sequence[int]) -> tuple[DecodeTier, ...]:
    """The tiers of dynamic speculation: `schedule[i]` is the draft count at i + 1 requests."""
    widest = {draft: num_reqs for num_reqs, draft in enumerate(schedule, 1)}
    return tuple(DecodeTier(draft + 1, widest[draft]) for draft in sorted(widest))


def default_capture_sizes(
    max_num_reqs: int,
    max_num_tokens: int,
    *,
    query_len: int = 1,
    tiers: Sequence[DecodeTier] = (),
    alignment: int = 1,
) -> tuple[int, ...]:
    """The default sizes, ascending, for steps up to `max_num_reqs` and `max_num_tokens`.

    `query_len` is 1 + speculative tokens; `tiers` replaces it if several lengths occur. Sizes above
    `DENSE_END` double up to the largest decode batch, which is always a size. With `alignment`
    every size is a multiple of it.
    """
    tiers = tiers or (DecodeTier(query_len, max_num_reqs),)
    widest = max(tier.query_len for tier in tiers) * max_num_reqs
    end = min(2 * widest, DENSE_END, max_num_tokens)
    sizes = {*_dense(end)}
    if end == max_num_tokens:
        sizes.add(end)
    for tier in tiers:
        sizes |= {size for size in _tier_sizes(tier) if size <= end}
        reach = tier.query_len * min(tier.max_num_reqs, max_num_tokens // tier.query_len)
        if 0 < reach <= end:
            sizes.add(reach)
        elif reach > end:
            sizes |= {*_doubling(end, reach)}
    return align_sizes(sorted(sizes), alignment, limit=max_num_tokens)


def _dense(end: int) -> Iterable[int]:
    yield from (n for n in (1, 2, 4) if n <= end)
    yield from range(8, min(end + 1, 256), 8)
    yield from range(256, end + 1, 16)


def _tier_sizes(tier: DecodeTier) -> Iterable[int]:
    """Sizes that hold a whole number of the tier's requests."""
    widest = min(tier.max_num_reqs, DENSE_END)
    counts = {widest} if tier.query_len == 1 else {widest, *_dense(widest)}
    return (tier.query_len * count for count in counts)


def _doubling(start: int, end: int) -> Iterable[int]:
    while (start := 2 * start) < end:
        yield start
    yield end


def user_capture_sizes(sizes: Sequence[int], *, max_num_tokens: int) -> tuple[int, ...]:
    """A user's list, checked and otherwise unchanged.

    Raises CaptureSizeInvalid for the first value that is not from 1 to `max_num_tokens`,
    is duplicated, or is out of order, and InvalidSetting for an empty list.
    """
    if not sizes:
        raise InvalidSetting(
            name="capture_sizes", value=sizes, reason="it is empty", expected="at least one size"
        )
    before = 0
    for position, size in enumerate(sizes):
        if fault := _fault(size, before, max_num_tokens):
            raise CaptureSizeInvalid(
                value=size, position=position, fault=fault, limit=max_num_tokens
            )
        before = size
    return tuple(sizes)


def _fault(size: int, before: int, limit: int) -> str | None:
    if size < 1:
        return "is not positive"
    if size > limit:
        return "is above the token limit"
    if size == before:
        return "is duplicated"
    if size < before:
        return f"follows the larger size {before}"
    return None


def align_sizes(sizes: Iterable[int], multiple: int, *, limit: int) -> tuple[int, ...]:
    """Each size rounded up to a multiple, ascending, without those above `limit`.

    For sequence parallelism (the number of ranks) or one decode length (1 + speculative tokens).
    Raises InvalidSetting if `multiple` itself is above `limit`.
    """
    if multiple > limit:
        raise InvalidSetting(
            name="alignment", value=multiple, reason=f"no size up to {limit} is a multiple of it",
            expected=f"{limit} or less",
        )  # fmt: skip
    rounded = {-(-size // multiple) * multiple for size in sizes}
    return tuple(sorted(size for size in rounded if size <= limit)) or (multiple,)
