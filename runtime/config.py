"""All settings of a prepared model: `CompileConfig` plus dispatch, capture and the cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from ..cache.keys.factors import Feeds, exempt
from ..compile.ir.config import LOCATION, TOKENS, CompileConfig
from ..dispatch import (
    AttentionSupport,
    Axis,
    Bucket,
    BucketLimits,
    CaptureStrategy,
    GraphMode,
    ModelTraits,
    PaddingLimit,
    user_capture_sizes,
)
from ..errors import InvalidSetting
from .open_cache import LayerConfig

UNDECLARED = "attention, for which attention_support is not set"

SERVING = Feeds(("capture",), "decided after compilation: the same code serves any of its values")


class Padding(StrEnum):
    """What a step writes into the padding of an input. KEEP leaves the memory as it is: zeros at
    first, later the values of an earlier step."""

    ZERO = "zero"
    SENTINEL = "sentinel"
    REPEAT = "repeat"
    KEEP = "keep"


class LoraGraphs(StrEnum):
    """Which numbers of active LoRA adapters get their own graphs."""

    ONE = "one"
    WITH_AND_WITHOUT = "with_and_without"
    BY_COUNT = "by_count"


class AfterSeal(StrEnum):
    """What happens when something compiles or captures after `seal()`, outside the strategy."""

    COUNT = "count"
    LOG = "log"
    RAISE = "raise"


class ColdStart(StrEnum):
    """What a start without a bundle does: it compiles, or serves and compiles in a child."""

    COMPILE = "compile"
    SERVE = "serve"


class BrokenGuard(StrEnum):
    """What a step does for sizes that break a guard."""

    ERROR = "error"
    EAGER = "eager"


def check_choice(known: Collection[str], setting: str, name: str, reason: str) -> None:
    """Raise InvalidSetting, with the valid names, if `name` is not one of `known`."""
    if name not in known:
        expected = "one of " + ", ".join(known)
        raise InvalidSetting(name=setting, value=name, reason=reason, expected=expected)


def without_tokens(config: CompileConfig) -> InvalidSetting:
    """The error for a model without an input that has the token dimension."""
    return InvalidSetting(
        name="inputs",
        value=config.inputs,
        reason=f"no input that the model reads has a dimension {TOKENS}",
        expected=f"that name for the token dimension, as in input_ids='int64[{TOKENS}]'",
    )


class Config(CompileConfig):
    """All settings of a model to serve, for `prepare` and `compile_ahead`.

    Choices may be given by name: `Config(guards="check", graph_mode="PIECEWISE")`. Unknown names
    and invalid values raise InvalidSetting here. Instances are immutable; `changed` makes a copy.
    """

    max_num_reqs: Annotated[int, SERVING, Field(ge=1)] = 256
    """The most requests of a step."""

    query_len: Annotated[int, SERVING, Field(ge=1)] = 1
    """Tokens of each request in a uniform decode step: 1 + speculative tokens."""

    query_lens: Annotated[tuple[PositiveInt, ...], SERVING] = ()
    """All query lengths of uniform decode steps, if there are several; each gets its own graphs."""

    speculation_schedule: Annotated[tuple[NonNegativeInt, ...], SERVING] = ()
    """Draft tokens by number of requests, for a number that falls with the load: item `i` is for
    `i + 1` requests. Replaces `query_len`; default sizes cover each length up to its load."""

    max_loras: Annotated[int, SERVING, Field(ge=0)] = 0
    """The most active LoRA adapters in a step. Without it, steps with adapters run without a
    graph. `Batch.num_loras` states the active ones; an input
    dimension `num_loras` has the size that a graph was captured for."""

    lora_graphs: Annotated[LoraGraphs, SERVING] = LoraGraphs.WITH_AND_WITHOUT
    """The graphs of each size with LoRA: one that serves all steps (`"one"`), another one without
    adapter kernels (`"with_and_without"`), or also for powers of two of adapters (`"by_count"`)."""

    axes: Annotated[tuple[Axis, ...], SERVING] = ()
    """Further host values that graphs depend on, such as a number of micro-batches: `Axis` objects
    with the values to capture for. Each `Batch` states its values."""

    traits: Annotated[ModelTraits, SERVING] = ModelTraits()
    """Properties of the model that limit graph modes, as a `ModelTraits` or a dict: `pooling`,
    `encoder_decoder`, and `varlen_decode` for decode steps with different query lengths up to the
    longest one."""

    attention_support: Annotated[
        Mapping[str, AttentionSupport] | AttentionSupport | None, SERVING
    ] = None
    """The batches whose attention can run inside a FULL graph, for all attention or as
    `{group: support}`: `"NEVER"`, `"UNIFORM_SINGLE_TOKEN_DECODE"`, `"UNIFORM_BATCH"` or
    `"ALWAYS"`. Declare it if the splitting ops read what changes between steps from tensors at
    fixed addresses: a FULL graph does not run their Python again. With `None` a model with
    splitting ops has no FULL graphs."""

    broken_guard: Annotated[BrokenGuard, exempt("decided in the step, by the sizes it has")] = (
        BrokenGuard.ERROR
    )
    """With `guards="check"`, what a step does for sizes that break a guard: raise GuardBroken
    (`"error"`), or run the model itself (`"eager"`)."""

    cold: Annotated[ColdStart, exempt("when code is compiled, not which code")] = ColdStart.COMPILE
    """A start without a bundle compiles first (`"compile"`), or serves the model uncompiled at once
    and switches when a child process has compiled it (`"serve"`); see docs/starts.md."""

    graph_mode: Annotated[GraphMode | None, SERVING] = None
    """`"NONE"`, `"PIECEWISE"`, `"FULL"`, `"FULL_DECODE_ONLY"` or `"FULL_AND_PIECEWISE"`; `None`
    uses the default of `level`. The report says which mode is used, and why."""

    buckets: Annotated[tuple[Bucket, ...], SERVING] = ()
    """Padded shapes (requests, query length, blocks of context) that get FULL graphs, instead of
    sizes in tokens, for an engine that pads its steps to them. Each `Batch` states the axes `query`
    and `context`."""

    bucket_limits: Annotated[BucketLimits | None, SERVING] = None
    """With `buckets`, the legal steps of the engine: `prepare` reports those without a bucket."""

    capture_sizes: Annotated[tuple[int, ...] | None, SERVING] = None
    """Padded sizes in tokens that get graphs, ascending; `None` uses `default_capture_sizes`."""

    size_alignment: Annotated[int, SERVING, Field(ge=1)] = 1
    """Capture sizes are rounded up to multiples of it: the number of sequence-parallel ranks."""

    strategy: Annotated[CaptureStrategy, SERVING] = CaptureStrategy.EAGER
    """When graphs are captured: all at startup (`"eager"`), the largest of each mode at startup and
    the rest between steps (`"delayed"`), or the rest on first use (`"lazy"`)."""

    captures_per_step: Annotated[int, SERVING, Field(ge=1)] = 1
    """The most captures between two steps: for `"delayed"` and `"lazy"`, and after a model has
    switched to compiled code (`cold="serve"`) for all."""

    memory_limit: Annotated[int | float | None, SERVING, Field(ge=0)] = None
    """The most memory for graphs: an integer is bytes, a float is a fraction of the device memory
    that is free at planning. Graphs that would exceed it are not captured."""

    lazy_bytes: Annotated[int | None, SERVING, Field(ge=0)] = None
    """Bytes of graphs that `"lazy"` captures after startup; above them it evicts the graphs that
    save least per byte."""

    padding: Annotated[dict[str, Padding | int | float], SERVING] = Field(default_factory=dict)
    """What padding contains, by input: `"zero"` (the default), `"repeat"` (the last real row),
    `"keep"` (the previous contents), or a number, such as the cache slot reserved for padding."""

    padding_limit: Annotated[PaddingLimit | None, SERVING] = None
    """The most padding a graph may add, a `PaddingLimit`. Batches that need more use a lower
    mode."""

    graph_backend: Annotated[str | None, SERVING] = None
    """`"cuda"`, `"replay"` or an entry point of the group `piecegraph.backends`; `None` uses
    the one for the model's device."""

    after_seal: Annotated[AfterSeal, SERVING] = AfterSeal.LOG
    """What happens when something compiles or captures after `seal()`, outside the strategy: it is
    counted (`"count"`), logged too (`"log"`), or an error (`"raise"`)."""

    cache_layers: Annotated[tuple[LayerConfig, ...], LOCATION] = ()
    """Shared `LayerConfig`s, looked up in order after the private directory; see docs/cache.md."""

    cache_bytes: Annotated[int, LOCATION, Field(ge=0)] = 10 << 30
    """The most bytes in the private directory; the least recently used entries are removed
    first."""

    cache_age_days: Annotated[float | None, LOCATION, Field(ge=0)] = None
    """Days that an entry is kept after its last use; `None` keeps entries until `cache_bytes`
    evicts them."""

    @field_validator("attention_support", mode="before")
    @classmethod
    def _named_support(cls, given: Any) -> Any:
        """Convert names to `AttentionSupport`."""
        if isinstance(given, Mapping):
            return {group: cls._named_support(support) for group, support in given.items()}
        if not isinstance(given, str):
            return given
        if given not in (names := AttentionSupport.__members__):
            raise InvalidSetting(
                name="attention_support",
                value=given,
                reason="unknown choice",
                expected=f"one of {', '.join(names)}",
            )
        return names[given]

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        """Some input must have the token dimension."""
        specs = self.input_specs().values()
        if self.inputs and not any(TOKENS in spec.shape for spec in specs):
            raise without_tokens(self)
        return self

    @model_validator(mode="after")
    def _check_capture_sizes(self) -> Self:
        """Capture sizes are ascending, distinct and within the served range."""
        if self.capture_sizes is not None:
            user_capture_sizes(self.capture_sizes, max_num_tokens=self.max_num_tokens)
        return self

    def padding_of(self, name: str) -> tuple[Padding, int | float]:
        """The padding policy of an input, and the number that SENTINEL writes."""
        policy = self.padding.get(name, Padding.ZERO)
        return (policy, 0) if isinstance(policy, Padding) else (Padding.SENTINEL, policy)

    def supports(self) -> dict[str, AttentionSupport]:
        """Attention capability by group. Ops for which nothing is declared support nothing."""
        support = self.attention_support
        if support is None:
            breaks = self.cuts() or not self.compile
            return {UNDECLARED: AttentionSupport.NEVER} if breaks else {}
        return {"attention": support} if isinstance(support, AttentionSupport) else dict(support)

    def backend_for(self, device_type: str) -> str:
        """Name of the graph backend for a device."""
        if self.graph_backend is not None:
            return self.graph_backend
        return "replay" if device_type == "cpu" else device_type

    def changed(self, **settings: Any) -> Config:
        """A copy with other settings, checked again."""
        return Config(
            **{**{name: getattr(self, name) for name in self.model_fields_set}, **settings}
        )
