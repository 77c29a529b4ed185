"""What does each part of a prepared model cost a step?

`ServedModel` is prepared with all parts, and once without each: steps of all of them are timed in
turn. What a part costs is the median of the differences in each round. A part that the settings do
not ask for has no cost; its row shows how much is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

from piecegraph import GraphMode
from piecegraph.cache.keys.environment import OFF
from piecegraph.runtime.setup.switches import PARTS

from .step import NUM_TOKENS, served_inputs, served_model, served_step
from .timing import interleaved

STEPS = {GraphMode.FULL_DECODE_ONLY: 400, GraphMode.PIECEWISE: 60, GraphMode.NONE: 20}
"""Steps that are timed at once, by mode."""


def run(quick: bool) -> dict[str, Any]:
    """Rows in microseconds per step: the cost of a part, and the middle half of its rounds."""
    rounds = 5 if quick else 31
    return {"ratios": {}, "rows": [row for mode in STEPS for row in _rows(mode, rounds)]}


def _rows(mode: GraphMode, rounds: int) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        steps = [_step(stack, mode, off) for off in ("", *PARTS)]
        whole, *without = interleaved(steps, rounds, STEPS[mode])
    rows = []
    for part, times in zip(PARTS, without, strict=True):
        costs = [one - two for one, two in zip(whole, times, strict=True)]
        low, _, high = quantiles(costs, n=4)
        rows.append(
            {
                "mode": mode.name,
                "part": part,
                "us": median(costs),
                "low_us": low,
                "high_us": high,
                "step_us": median(whole),
            }
        )
    return rows


def _step(stack: ExitStack, mode: GraphMode, off: str) -> Callable[[], None]:
    """A step of a model without the part `off`."""
    inputs = served_inputs()
    with patch.dict("os.environ", {OFF: off}):
        prepared, caches = served_model(mode)
    stack.callback(prepared.close)
    stack.callback(caches.clear)  # watched memory stays alive until then
    return partial(served_step, prepared, NUM_TOKENS, object(), inputs)
