"""Graph modes as they are configured, runtime modes as one step uses them, attention capability."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class RuntimeMode(IntEnum):
    """How one step runs; a greater value leaves less work to the host."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class GraphMode(StrEnum):
    """What is configured: one routine for decode batches, one for all others (`mixed`)."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def decode(self) -> RuntimeMode:
        """The best runtime mode for a decode batch."""
        return _ROUTINES[self][0]

    @property
    def mixed(self) -> RuntimeMode:
        """The best runtime mode for a batch with prefill in it."""
        return _ROUTINES[self][1]

    @property
    def separate_decode(self) -> bool:
        """Whether decode batches have graphs of their own, keyed by their query length."""
        return self.decode is not self.mixed

    @property
    def needs_pieces(self) -> bool:
        return self.mixed is RuntimeMode.PIECEWISE


_ROUTINES = {
    GraphMode.NONE: (RuntimeMode.NONE, RuntimeMode.NONE),
    GraphMode.PIECEWISE: (RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE),
    GraphMode.FULL: (RuntimeMode.FULL, RuntimeMode.FULL),
    GraphMode.FULL_DECODE_ONLY: (RuntimeMode.FULL, RuntimeMode.NONE),
    GraphMode.FULL_AND_PIECEWISE: (RuntimeMode.FULL, RuntimeMode.PIECEWISE),
}


class AttentionSupport(IntEnum):
    """The batches whose attention one attention group can run inside a FULL graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3
