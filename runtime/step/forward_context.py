"""What a step tells the ops inside it: layers by name, metadata, the decision, real tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ...errors import OutsideStep


class ForwardContext:
    """One step's facts. A prepared model owns one and writes it anew before each step.

    Eager calls inside a recording read it when they run, never when they are captured.
    """

    __slots__ = ("decision", "layers", "metadata", "num_tokens")

    def __init__(
        self,
        layers: Mapping[str, Any],
        metadata: Any = None,
        decision: Any = None,
        num_tokens: int = 0,
    ) -> None:
        self.layers = layers
        self.metadata = metadata
        self.decision = decision
        self.num_tokens = num_tokens


# The hot path sets and resets this itself; everyone else uses the two functions below.
CURRENT: ContextVar[ForwardContext | None] = ContextVar("piecegraph_forward", default=None)


def get_forward_context() -> ForwardContext:
    """The context of the step that runs in this thread. Raises `OutsideStep` when none does."""
    context = CURRENT.get()
    if context is None:
        raise OutsideStep()
    return context


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` current inside the block; the previous one is back after it, come what may."""
    token = CURRENT.set(context)
    try:
        yield context
    finally:
        CURRENT.reset(token)
