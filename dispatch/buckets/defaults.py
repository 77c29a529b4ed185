"""The range of each dimension that a bucket strategy has by default."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .limits import LONG_CONTEXT, BucketLimits, Phase
from .ranges import exponential, linear, padding_aware


class BucketStrategy(StrEnum):
    LINEAR = "linear"
    EXPONENTIAL = "exponential"
    PADDING_AWARE = "padding-aware"


@dataclass(frozen=True, slots=True)
class BucketRanges:
    """The values of each dimension; in decode the query length is 1."""

    batch: Sequence[int]
    query: Sequence[int]
    context: Sequence[int]


def default_ranges(phase: Phase, limits: BucketLimits, strategy: BucketStrategy) -> BucketRanges:
    """The ranges that `strategy` has for `phase`; raises InvalidSetting where limits clash."""
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
