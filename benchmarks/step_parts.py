"""What does each part of a prepared model cost a step?

`ServedModel` is prepared for each part twice, with it and without it, and in a way that asks for
it where steps show its cost: see `ASKED`. Steps of all of them are timed in turn. What a part costs
is the median of the differences in each round. The cost of a part that only works between steps or
beside them is zero; its row shows how much is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

from piecegraph import GraphMode, PreparedModel, StepObserver
from piecegraph.cache.keys.environment import OFF
from piecegraph.runtime.setup.switches import PARTS

from .step import NUM_TOKENS, served_inputs, served_model, served_step
from .timing import interleaved

STEPS = {GraphMode.FULL_DECODE_ONLY: 400, GraphMode.PIECEWISE: 60, GraphMode.NONE: 20}
"""Steps that are timed at once, by mode."""


class Observer(StepObserver):
    """What an engine that logs its steps adds, without the log."""


def _observed(prepared: PreparedModel) -> None:
    prepared.parts.log.observe(Observer())


ASKED: dict[str, tuple[dict[str, Any], Callable[[PreparedModel], None]]] = {
    "log": ({}, _observed),
    "strategies": ({"strategy": "lazy", "capture_sizes": (1, NUM_TOKENS)}, lambda prepared: None),
}
"""Settings, and what is done with the model, for parts that cost a step something on request: an
observer, and a graph that is not captured yet. Proofs are not here: of graphs that do nothing none
would hold."""


def run(quick: bool) -> dict[str, Any]:
    """Rows in microseconds per step: the cost of a part, and the middle half of its rounds."""
    rounds = 5 if quick else 31
    return {"ratios": {}, "rows": [row for mode in STEPS for row in _rows(mode, rounds)]}


def _rows(mode: GraphMode, rounds: int) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        steps = [_step(stack, mode, part, off) for part in PARTS for off in ("", part)]
        times = interleaved(steps, rounds, STEPS[mode])
    return [
        _row(mode, part, *times[2 * number : 2 * number + 2]) for number, part in enumerate(PARTS)
    ]


def _row(
    mode: GraphMode, part: str, with_it: tuple[float, ...], without: tuple[float, ...]
) -> dict[str, Any]:
    costs = [one - two for one, two in zip(with_it, without, strict=True)]
    low, _, high = quantiles(costs, n=4)
    row = {"mode": mode.name, "part": part, "us": median(costs)}
    return row | {"low_us": low, "high_us": high, "step_us": median(with_it)}


def _step(stack: ExitStack, mode: GraphMode, part: str, off: str) -> Callable[[], None]:
    """A step of a model that asks for `part`, without the part `off`."""
    inputs = served_inputs()
    settings, prepare_steps = ASKED.get(part, ({}, lambda prepared: None))
    with patch.dict("os.environ", {OFF: off}):
        prepared, caches = served_model(mode, **settings)
        prepare_steps(prepared)
    stack.callback(prepared.close)
    stack.callback(caches.clear)  # watched memory stays alive until then
    return partial(served_step, prepared, NUM_TOKENS, object, inputs)
