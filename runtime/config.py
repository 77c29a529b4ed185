"""All settings of a prepared model: those of compilation, and those of dispatch and capture."""

from __future__ import annotations

from collections.abc import Mapping
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
    """What becomes of compiling and capturing after `seal()` outside the strategy."""

    COUNT = "count"
    LOG = "log"
    RAISE = "raise"


class BrokenGuard(StrEnum):
    """What a step does for sizes at which a guard that is only checked does not hold."""

    ERROR = "error"
    EAGER = "eager"


def without_tokens(config: CompileConfig) -> InvalidSetting:
    """What to raise where no input of the model tells the number of tokens."""
    return InvalidSetting(
        name="inputs",
        value=config.inputs,
        reason=f"no input that the model reads has a dimension {TOKENS}",
        expected=f"that name for the token dimension, as in input_ids='int64[{TOKENS}]'",
    )


class Config(CompileConfig):
    """What a user states about a model that is to be served. Unknown names are refused."""

    graph_mode: Annotated[GraphMode | None, SERVING] = None
    """The mode asked for; what it becomes, and why, is in the report."""

    attention_support: Annotated[Mapping[str, AttentionSupport] | AttentionSupport, SERVING] = (
        AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    """Which batches attention can serve inside a FULL graph; by attention group, or for all."""

    max_num_reqs: Annotated[int, SERVING, Field(ge=1)] = 256
    """Most requests in a step."""

    query_len: Annotated[int, SERVING, Field(ge=1)] = 1
    """Query length of a uniform decode request: 1 + speculative tokens."""

    capture_sizes: Annotated[tuple[int, ...] | None, SERVING] = None
    """Padded sizes in tokens to capture; by default the ladder of `default_capture_sizes`."""

    broken_guard: Annotated[BrokenGuard, exempt("decided in the step, by the sizes it has")] = (
        BrokenGuard.ERROR
    )
    """With `guards="check"`: raise GuardBroken, or run the model itself for such sizes."""

    strategy: Annotated[CaptureStrategy, SERVING] = CaptureStrategy.EAGER

    captures_per_step: Annotated[int, SERVING, Field(ge=1)] = 1
    """Most captures between two steps, for DELAYED and LAZY."""

    min_hits: Annotated[int, SERVING, Field(ge=1)] = 1
    """Occurrences of a size before LAZY captures it."""

    capture_ms_per_step: Annotated[float | None, SERVING, Field(ge=0)] = None
    """Most milliseconds of capturing between two steps, by the measured cost of captures."""

    memory_limit: Annotated[int | float | None, SERVING, Field(ge=0)] = None
    """Most memory for graphs: an integer is bytes, a float a fraction of what is free then."""

    lazy_bytes: Annotated[int | None, SERVING, Field(ge=0)] = None
    """Bytes of recordings captured on use; beyond them LAZY evicts what is worth least."""

    after_seal: Annotated[AfterSeal, SERVING] = AfterSeal.LOG
    """Count, log or raise what compiles or captures after `seal()`; see `runtime.monitors`."""

    padding_limit: Annotated[PaddingLimit | None, SERVING] = None
    """The most padding a graph may bring; above it a batch goes to a lower mode."""

    padding: Annotated[dict[str, Padding | int | float], SERVING] = Field(default_factory=dict)
    """What a graph's padding holds, by input: `zero` (the default), `repeat` (the last real row),
    `keep` (whatever is there), or a number, such as the cache slot that padding may write to."""

    graph_backend: Annotated[str | None, SERVING] = None
    """`cuda`, `replay` or an entry point; by default the one for the model's device."""

    cache_layers: Annotated[tuple[LayerConfig, ...], LOCATION] = ()
    """Shared places that are asked, in order, for what the private directory lacks."""

    cache_bytes: Annotated[int, LOCATION, Field(ge=0)] = 10 << 30
    """Most bytes kept in the private directory; what was used least recently goes first."""

    cache_age_days: Annotated[float | None, LOCATION, Field(ge=0)] = None
    """Days after its last use that an entry is kept; None for ever."""

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        """A step has a number of tokens, and some input must tell it."""
        specs = self.input_specs().values()
        if self.inputs and not any(TOKENS in spec.shape for spec in specs):
            raise without_tokens(self)
        return self

    def padding_of(self, name: str) -> tuple[Padding, int | float]:
        """The padding policy of an input, with the number that SENTINEL writes."""
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
        """A copy with other settings, checked anew."""
        return Config(
            **{**{name: getattr(self, name) for name in self.model_fields_set}, **settings}
        )
