"""Graph modes (configured), runtime modes (of one step), and attention support."""

from __future__ import annotations

from enum import EnumType, IntEnum, StrEnum


class Members(EnumType):
    """Metaclass that keeps the methods of `str` and `int` out of `dir()` and `help()`."""

    def __dir__(cls) -> list[str]:
        properties = (name for name, value in vars(cls).items() if isinstance(value, property))
        return [*cls.__members__, *properties]


class RuntimeMode(IntEnum, metaclass=Members):
    """How one step runs; a greater value means less work on the host."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class CaptureStrategy(StrEnum, metaclass=Members):
    """When graphs are captured: all at startup, a few per step, or on use."""

    EAGER = "eager"
    DELAYED = "delayed"
    LAZY = "lazy"


class GraphMode(StrEnum, metaclass=Members):
    """The configured mode: one runtime mode for decode batches, one for all others (`mixed`)."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def decode(self) -> RuntimeMode:
        """The best runtime mode for a decode batch."""
        return _RUNTIME_MODES[self][0]

    @property
    def mixed(self) -> RuntimeMode:
        """The best runtime mode for a batch with prefill tokens."""
        return _RUNTIME_MODES[self][1]

    @property
    def separate_decode(self) -> bool:
        """Whether decode batches have separate graphs, keyed by query length."""
        return self.decode is not self.mixed

    @property
    def needs_pieces(self) -> bool:
        return self.mixed is RuntimeMode.PIECEWISE


_RUNTIME_MODES = {
    GraphMode.NONE: (RuntimeMode.NONE, RuntimeMode.NONE),
    GraphMode.PIECEWISE: (RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE),
    GraphMode.FULL: (RuntimeMode.FULL, RuntimeMode.FULL),
    GraphMode.FULL_DECODE_ONLY: (RuntimeMode.FULL, RuntimeMode.NONE),
    GraphMode.FULL_AND_PIECEWISE: (RuntimeMode.FULL, RuntimeMode.PIECEWISE),
}


class AttentionSupport(IntEnum, metaclass=Members):
    """The batches whose attention can run inside a FULL graph, by attention group."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class LoraGraphs(StrEnum):
    """Which numbers of active LoRA adapters get their own graphs."""

    ONE = "one"
    WITH_AND_WITHOUT = "with_and_without"
    BY_COUNT = "by_count"
