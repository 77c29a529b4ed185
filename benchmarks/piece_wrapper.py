"""The design to compare with: a wrapper around every piece that dispatches at each step.

As engines do it, each wrapper asks the forward context for the mode and the descriptor of the
step, looks the descriptor up among its own recordings, and replays; each splitting op is found
again by name and asks the context for its layer. None of it depends on anything but the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph import PreparedModel, RuntimeMode


@dataclass(frozen=True)
class StepKey:
    num_tokens: int
    num_reqs: int | None
    uniform: bool
    has_lora: bool
    num_active_loras: int


@dataclass
class StepFacts:
    """What a wrapper reads about the current step."""

    layers: dict[str, Any]
    metadata: Any
    mode: RuntimeMode
    key: StepKey


@dataclass
class WrapperEntry:
    replay: Callable[[], None]
    output: Any


class Offloader:
    def sync_prev_onload(self) -> None:
        pass


class Current:
    """Replaces an engine's global variable for the current step."""

    step: StepFacts | None = None
    offloader = Offloader()


def is_step_available(current: Current) -> bool:
    return current.step is not None


def get_step(current: Current) -> StepFacts:
    assert current.step is not None
    return current.step


def get_offloader(current: Current) -> Offloader:
    return current.offloader


@contextmanager
def step_context(current: Current, layers: dict[str, Any], num_tokens: int) -> Iterator[None]:
    key = StepKey(num_tokens, None, False, False, 0)
    before = current.step
    current.step = StepFacts(layers, None, RuntimeMode.PIECEWISE, key)
    try:
        yield
    finally:
        current.step = before


class PieceWrapper:
    def __init__(self, piece: Callable[..., Any], current: Current) -> None:
        self.piece = piece
        self.mode = RuntimeMode.PIECEWISE
        self.current = current
        self.entries: dict[StepKey, WrapperEntry] = {}
        self.is_debugging = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_step_available(self.current):
            return self.piece(*args, **kwargs)
        step = get_step(self.current)
        key, mode = step.key, step.mode
        if mode == RuntimeMode.NONE or mode != self.mode:
            return self.piece(*args, **kwargs)
        assert key is not None
        if key not in self.entries:
            self.entries[key] = WrapperEntry(_nothing, self.piece(*args, **kwargs))
        entry = self.entries[key]
        if self.is_debugging:
            raise AssertionError
        get_offloader(self.current).sync_prev_onload()
        entry.replay()
        return entry.output


def _nothing() -> None:
    pass


def wrapped_step(
    prepared: PreparedModel, layers: dict[str, Any], inputs: tuple[torch.Tensor, ...]
) -> Callable[[], Any]:
    """A step of the same stitched code with a wrapper around each piece and each splitting op."""
    current = Current()

    def call_hook(use: int, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
            step = get_step(current)
            assert step.layers[layer_name] is not step.metadata
            torch.ops.piecegraph_bench.idle.default(x, output, layer_name)

        return call

    stitched = prepared.compiled.link(
        lambda plan: (lambda use, piece: PieceWrapper(piece, current), call_hook)
    )

    def step() -> Any:
        with step_context(current, layers, len(inputs[0])):
            return stitched(*inputs)

    return step
