"""Buckets, and the limits of the engine, which say what batches are legal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ...errors import InvalidSetting


class Phase(StrEnum):
    PROMPT = "prompt"
    DECODE = "decode"


class Bucket(NamedTuple):
    """A padded shape: requests, query length, and blocks of context.

    Context is counted per request in prompts and in total in decode, where the query length is 1.
    """

    batch: int
    query: int
    context: int

    @property
    def phase(self) -> Phase:
        return Phase.DECODE if self.query == 1 else Phase.PROMPT

    def holds(self, other: Bucket) -> bool:
        return (
            self.batch >= other.batch
            and self.query >= other.query
            and self.context >= other.context
        )


class BucketOrder(StrEnum):
    """The order in which the buckets of a phase are captured: the fewest tokens first, of the query
    or of context, or the most requests first."""

    MIN_TOKENS = "min_tokens"
    MAX_BS = "max_bs"


def order_key(order: BucketOrder, bucket: Bucket) -> tuple[int, ...]:
    """The key to sort buckets by; the context decides between equal ones."""
    batch, query, context = bucket
    length = context if bucket.phase is Phase.DECODE else query
    if order == BucketOrder.MIN_TOKENS:
        return batch * length, length, batch, context
    return -batch, length, context


@dataclass(frozen=True, slots=True)
class BucketMemory:
    """How the memory that graphs may take is spent on buckets.

    `prompt_share` of it is for prompts and the rest for decode; what one of them leaves goes to the
    other. The buckets of each are captured in its order while they fit.
    """

    prompt_share: float = 0.3
    prompt_order: BucketOrder = BucketOrder.MIN_TOKENS
    decode_order: BucketOrder = BucketOrder.MAX_BS

    def __post_init__(self) -> None:
        orders = ", ".join(BucketOrder)
        for name, valid, expected in (
            ("prompt_share", 0 <= self.prompt_share <= 1, "a share from 0 to 1"),
            ("prompt_order", self.prompt_order in list(BucketOrder), f"one of {orders}"),
            ("decode_order", self.decode_order in list(BucketOrder), f"one of {orders}"),
        ):
            if not valid:
                raise InvalidSetting(
                    name=f"sizes.bucket_memory.{name}",
                    value=getattr(self, name),
                    reason="there is no such choice",
                    expected=expected,
                )


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """The engine's limits. Lengths and `block_size` (of a KV-cache block) are in tokens.

    `total_blocks` is the size of the KV cache, None if unknown. `contiguous`: attention reads all
    blocks up to the highest in use. `clamped`: decode never uses more than three times the cache
    (shared blocks count for each request). `merged_prefill`: prompts are concatenated into one
    row. `slice_size` and `slice_from`: queries of sliding-window models are cut into slices.
    `chunk_size`: queries of state-space models are multiples of it.
    """

    block_size: int
    max_num_tokens: int
    max_model_len: int
    max_num_reqs: int
    max_prefill_reqs: int = 1
    total_blocks: int | None = None
    contiguous: bool = False
    clamped: bool = True
    merged_prefill: bool = False
    slice_size: int | None = None
    slice_from: int = 8192
    chunk_size: int | None = None

    def blocks(self, tokens: int) -> int:
        """The number of blocks that hold `tokens`."""
        return -(-tokens // self.block_size)

    @property
    def request_blocks(self) -> int:
        """The number of blocks of the longest request."""
        return self.blocks(self.max_model_len)

    def most_context(self, phase: Phase, batch: int, query: int) -> int:
        """The most blocks of context for a batch of `batch` requests of length `query`."""
        total = self.total_blocks
        if phase is Phase.PROMPT:
            if not self.merged_prefill:
                return self.blocks(self.max_model_len - query)
            rest = self.max_model_len - query // self.max_prefill_reqs
            return self.max_prefill_reqs * (rest // self.block_size)
        if self.contiguous:
            return total or self.max_num_reqs * self.request_blocks
        most = batch * self.request_blocks
        return min(most, 3 * total) if total and self.clamped else most

    def keeps(self, bucket: Bucket) -> bool:
        """Whether some legal batch may need the bucket."""
        if bucket.batch > self.max_num_reqs:
            return False
        if bucket.phase is Phase.DECODE:
            fits = bucket.batch <= self.max_num_tokens
            return fits and (self.contiguous or bucket.batch <= bucket.context)
        if self.merged_prefill:
            return bucket.context <= self.most_context(Phase.PROMPT, bucket.batch, bucket.query)
        if self.slice_size is not None:
            sliced = bucket.query < self.slice_from or bucket.query % self.slice_size == 0
            return bucket.context != 0 or sliced
        return (
            bucket.context <= self.most_context(Phase.PROMPT, bucket.batch, 1)
            and bucket.query <= self.max_model_len
            and bucket.batch * bucket.query <= self.max_num_tokens
        )
