"""What ops can read about the step they run in: layers by name, metadata, decision, num_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..errors import OutsideStep


class ForwardContext:
    """The facts of one step. A prepared model owns one and rewrites it before each step.

    A splitting op in a PIECEWISE recording reads it at each replay; Python inside a graph read it
    once, at capture. `num_tokens` counts real tokens, without padding.
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


# Set directly by `StepRunner.run`, the hot path; use the functions below elsewhere.
CURRENT: ContextVar[Any] = ContextVar("piecegraph_forward", default=None)
"""A ForwardContext, that of a capture inside one, or None."""


def get_forward_context() -> ForwardContext:
    """The context of the step that runs in this thread. Raises OutsideStep if there is none."""
    context: ForwardContext | None = CURRENT.get()
    if context is None:
        raise OutsideStep()
    return context


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` current inside the block."""
    token = CURRENT.set(context)
    try:
        yield context
    finally:
        CURRENT.reset(token)
