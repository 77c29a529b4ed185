"""The settings of dispatch beyond the common ones, as objects of `Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from ..errors import InvalidSetting
from ..settings import Settings
from .buckets.bucket import Bucket, BucketLimits, BucketMemory
from .modes import AttentionSupport, LoraGraphs
from .plan import Axis, PaddingLimit


class Sizes(Settings):
    """The padded sizes that get graphs, beyond `Config.capture_sizes`."""

    _path: ClassVar[str] = "sizes"

    alignment: int = Field(default=1, ge=1)
    """Capture sizes are rounded up to multiples of it: the number of sequence-parallel ranks."""

    padding_limit: PaddingLimit | None = None
    """The most padding a graph may add, a `PaddingLimit`. Batches that need more use a lower
    mode."""

    buckets: tuple[Bucket, ...] = ()
    """Padded shapes (requests, query length, blocks of context) that get FULL graphs, instead of
    sizes in tokens, for an engine that pads its steps to them. Each `Batch` states the axes `query`
    and `context`."""

    bucket_limits: BucketLimits | None = None
    """With `buckets`, the legal steps of the engine: `prepare` reports those without a bucket."""

    bucket_memory: BucketMemory = BucketMemory()
    """With `buckets` and `steps.memory_limit`, how the limit is shared by prompts and decode, and
    in which orders their buckets are captured: a `BucketMemory`."""


class Variants(Settings):
    """What sets graphs of one size apart: the other dimensions of the dispatch key."""

    _path: ClassVar[str] = "variants"

    query_lens: tuple[PositiveInt, ...] = ()
    """Tokens of each request in a uniform decode step, 1 + speculative tokens: a number, or several
    that each get their own graphs. By default 1, or the lengths of `speculation_schedule`."""

    speculation_schedule: tuple[NonNegativeInt, ...] = ()
    """Draft tokens by number of requests, for a number that falls with the load: item `i` is for
    `i + 1` requests. Default sizes cover each length up to its load."""

    max_loras: int = Field(default=0, ge=0)
    """The most active LoRA adapters in a step. Without it, steps with adapters run without a graph.
    `Batch.num_loras` states the active ones; an input dimension `num_loras` has the size that a
    graph was captured for."""

    lora_graphs: LoraGraphs = LoraGraphs.WITH_AND_WITHOUT
    """The graphs of each size with LoRA: one that serves all steps (`"one"`), another one without
    adapter kernels (`"with_and_without"`), or also for powers of two of adapters (`"by_count"`)."""

    axes: tuple[Axis, ...] = ()
    """Further host values that graphs depend on, such as a number of micro-batches: `Axis` objects
    with the values to capture for. Each `Batch` states its values."""

    @field_validator("query_lens", mode="before")
    @classmethod
    def _several(cls, lengths: Any) -> Any:
        """One length is a number."""
        return (lengths,) if isinstance(lengths, int) else lengths

    def all_query_lens(self) -> tuple[int, ...]:
        """The query lengths of uniform decode, ascending, with those of the schedule."""
        drafts = {draft + 1 for draft in self.speculation_schedule}
        return tuple(sorted({*self.query_lens, *drafts} or {1}))


class Attention(Settings):
    """What the model's attention allows inside a FULL graph."""

    _path: ClassVar[str] = "attention"

    support: Mapping[str, AttentionSupport] | AttentionSupport | None = None
    """The batches whose attention can run inside a FULL graph, for all attention or as
    `{group: support}`: `"NEVER"`, `"UNIFORM_SINGLE_TOKEN_DECODE"`, `"UNIFORM_BATCH"` or
    `"ALWAYS"`. Declare it if the splitting ops read what changes between steps from tensors at
    fixed addresses: a FULL graph does not run their Python again. With `None` a model with
    splitting ops has no FULL graphs."""

    varlen_decode: bool = False
    """Decode steps mix requests of different query lengths, up to the longest one."""

    @field_validator("support", mode="before")
    @classmethod
    def _named(cls, support: Any) -> Any:
        """Convert names to `AttentionSupport`."""
        if isinstance(support, Mapping):
            return {group: cls._named(each) for group, each in support.items()}
        if not isinstance(support, str):
            return support
        if support not in (names := AttentionSupport.__members__):
            raise InvalidSetting(
                name="attention.support",
                value=support,
                reason="unknown choice",
                expected=f"one of {', '.join(names)}",
            )
        return names[support]
