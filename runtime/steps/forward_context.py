"""What ops can read about the step they run in: layers by name, metadata, decision, num_tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from ...errors import OutsideStep, StaleContext


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


class CapturedContext:
    """The forward context as Python inside a graph saw it at capture.

    On a device that Python does not run again. An emulated replay runs it with these values; with
    `strict`, reading one that the step has another value for raises StaleContext.
    """

    __slots__ = ("_captured", "_step", "_strict", "layers")

    def __init__(self, context: ForwardContext, strict: bool) -> None:
        self.layers = context.layers
        self._captured = (context.metadata, context.decision, context.num_tokens)
        self._strict = strict
        self._step: ForwardContext | CapturedContext | None = None

    @property
    def metadata(self) -> Any:
        return self._read(0, "metadata")

    @property
    def decision(self) -> Any:
        return self._read(1, "decision")

    @property
    def num_tokens(self) -> Any:
        return self._read(2, "num_tokens")

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)` in this context."""
        self._step = CURRENT.get()
        token = CURRENT.set(self)
        try:
            return fn(*args)
        finally:
            CURRENT.reset(token)
            self._step = None

    def _read(self, position: int, name: str) -> Any:
        captured = self._captured[position]
        if self._strict and self._step is not None:
            now = getattr(self._step, name)
            if now is not captured and not (name == "num_tokens" and now == captured):
                frame = inspect.stack(0)[2]
                where = f"{frame.filename}:{frame.lineno}"
                raise StaleContext(where=where, reader=frame.function, fact=name)
        return captured


# Set directly by `Steps.run`, the hot path; use the functions below elsewhere.
CURRENT: ContextVar[ForwardContext | CapturedContext | None] = ContextVar(
    "piecegraph_forward", default=None
)


def keep_context(strict: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function that always runs in the present context; see CapturedContext."""
    context = CURRENT.get()
    if not isinstance(context, ForwardContext):
        return lambda fn: fn
    return partial(partial, CapturedContext(context, strict).call)


def get_forward_context() -> ForwardContext | CapturedContext:
    """The context of the step that runs in this thread. Raises OutsideStep if there is none."""
    context = CURRENT.get()
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
