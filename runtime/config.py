"""All settings of a prepared model: those of compilation, and those of dispatch and capture."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from ..cache.keys.annotations import Feeds, exempt
from ..compile.ir.config import LOCATION, TOKENS, CompileConfig
from ..dispatch import AttentionSupport, CaptureStrategy, GraphMode, PaddingLimit
from ..errors import InvalidSetting
from .open_cache import LayerConfig

SERVING = Feeds(("capture",), "decided after compilation: the same code serves any of its values")


class Padding(StrEnum):
    """What a step writes into the padding of an input. KEEP leaves the memory as it is: zeros at
    first, later the values of an earlier step."""

    ZERO = "zero"
    SENTINEL = "sentinel"
    REPEAT = "repeat"
    KEEP = "keep"


class AfterSeal(StrEnum):
    """What happens when something compiles or is captured after `seal()`, outside the strategy."""

    COUNT = "count"
    LOG = "log"
    RAISE = "raise"


class BrokenGuard(StrEnum):
    """What a step does at sizes for which a guard that is only checked does not hold."""

    ERROR = "error"
    EAGER = "eager"


def check_choice(known: Collection[str], setting: str, name: str, reason: str) -> None:
    """Raise InvalidSetting, with the valid names, if `name` is not one of `known`."""
    if name not in known:
        expected = "one of " + ", ".join(known)
        raise InvalidSetting(name=setting, value=name, reason=reason, expected=expected)


def without_tokens(config: CompileConfig) -> InvalidSetting:
    """The error for a model of which no input has a token dimension."""
    return InvalidSetting(
        name="inputs",
        value=config.inputs,
        reason=f"no input that the model reads has a dimension {TOKENS}",
        expected=f"that name for the token dimension, as in input_ids='int64[{TOKENS}]'",
    )


class Config(CompileConfig):
    """All settings of `prepare`. Unknown names are refused."""

    graph_mode: Annotated[GraphMode | None, SERVING] = None
    """Requested graph mode: NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE. None
    (default) is the mode of `level`. The report states the mode in use and why it differs."""

    attention_support: Annotated[Mapping[str, AttentionSupport] | AttentionSupport, SERVING] = (
        AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    """Which batches attention can serve inside a FULL graph: one value for all attention, or a
    value per attention group. The least capable group decides. Default: decode steps with one
    token per request."""

    max_num_reqs: Annotated[int, SERVING, Field(ge=1)] = 256
    """Most requests in a step. Default 256. `dispatch` refuses larger batches."""

    query_len: Annotated[int, SERVING, Field(ge=1)] = 1
    """Tokens per request in a uniform decode step: 1 + speculative tokens. Default 1."""

    capture_sizes: Annotated[tuple[int, ...] | None, SERVING] = None
    """Padded sizes to capture, in tokens. None (default) takes the sizes of
    `default_capture_sizes`."""

    broken_guard: Annotated[BrokenGuard, exempt("decided in the step, by the sizes it has")] = (
        BrokenGuard.ERROR
    )
    """With `guards="check"`, what a step does at sizes that break a guard: raise GuardBroken
    ("error", the default), or run the uncompiled model ("eager")."""

    strategy: Annotated[CaptureStrategy, SERVING] = CaptureStrategy.EAGER
    """When graphs are captured: all at startup ("eager", the default), the largest of each mode at
    startup and the rest between steps ("delayed"), or the rest on first use ("lazy")."""

    captures_per_step: Annotated[int, SERVING, Field(ge=1)] = 1
    """Most captures between two steps, for "delayed" and "lazy". Default 1."""

    min_hits: Annotated[int, SERVING, Field(ge=1)] = 1
    """How many batches must want a graph before "lazy" captures it. Default 1."""

    capture_ms_per_step: Annotated[float | None, SERVING, Field(ge=0)] = None
    """Milliseconds of capturing between two steps, for "delayed" and "lazy", by the measured cost
    of earlier captures. None (default) does not limit the time."""

    memory_limit: Annotated[int | float | None, SERVING, Field(ge=0)] = None
    """Most memory for graphs: an int is bytes, a float is a fraction of the device memory that is
    free when planning. Graphs are pruned before capture to keep it. None (default) is no limit."""

    lazy_bytes: Annotated[int | None, SERVING, Field(ge=0)] = None
    """Bytes for graphs that "lazy" captures after startup; above it the graphs that save least per
    byte are evicted. None (default) is no limit."""

    after_seal: Annotated[AfterSeal, SERVING] = AfterSeal.LOG
    """What happens when something compiles or is captured after `seal()`, outside the strategy: it
    is counted ("count"), counted and logged ("log", the default), or an error ("raise")."""

    padding_limit: Annotated[PaddingLimit | None, SERVING] = None
    """Most padding that a graph may add to a batch; above it the batch uses a lower mode. None
    (default) is no limit."""

    padding: Annotated[dict[str, Padding | int | float], SERVING] = Field(default_factory=dict)
    """What the padding of each input holds: "zero" (the default), "repeat" (the last real row),
    "keep" (whatever is there), or a number, such as the cache slot that padding may write to."""

    graph_backend: Annotated[str | None, SERVING] = None
    """Graph backend: "cuda", "replay" or the name of an entry point. None (default) is the one for
    the model's device: "replay" on a CPU."""

    cache_layers: Annotated[tuple[LayerConfig, ...], LOCATION] = ()
    """Shared places searched in this order for entries that the private directory lacks. Default:
    none."""

    cache_bytes: Annotated[int, LOCATION, Field(ge=0)] = 10 << 30
    """Most bytes in the private cache directory; the least recently used entries are evicted.
    Default 10 GiB."""

    cache_age_days: Annotated[float | None, LOCATION, Field(ge=0)] = None
    """Days that an entry is kept after its last use. None (default) keeps entries until
    `cache_bytes` evicts them."""

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        specs = self.input_specs().values()
        if self.inputs and not any(TOKENS in spec.shape for spec in specs):
            raise without_tokens(self)
        return self

    def padding_of(self, name: str) -> tuple[Padding, int | float]:
        """The padding policy of an input, and the number that SENTINEL writes."""
        policy = self.padding.get(name, Padding.ZERO)
        return (policy, 0) if isinstance(policy, Padding) else (Padding.SENTINEL, policy)

    def supports(self) -> dict[str, AttentionSupport]:
        """Attention capability by group."""
        support = self.attention_support
        return {"attention": support} if isinstance(support, AttentionSupport) else dict(support)

    def backend_for(self, device_type: str) -> str:
        """Name of the graph backend for a device."""
        if self.graph_backend is not None:
            return self.graph_backend
        return "replay" if device_type == "cpu" else device_type

    def changed(self, **settings: Any) -> Config:
        """A validated copy with other settings."""
        return Config(
            **{**{name: getattr(self, name) for name in self.model_fields_set}, **settings}
        )
