"""Steps of vLLM with its norms and activations as ops of its own, and without, both prepared.

vLLM wraps them where it has a GPU, and its passes lower them again: a step must take as long. For
each family two engines stay alive and serve in turn, first in one order and then in the other.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import Any

from .engine import CONCURRENCY, StartedEngine, python_with
from .engine_once import FAMILIES

WAYS = ("piecegraph", "wrapped")


def rows(model: dict[str, Any], runs: int) -> Iterator[dict[str, Any]]:
    """For each number of requests, the seconds of a run with wrapped ops over those of the one
    beside it without: median and quartiles of `runs` pairs."""
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as name, ExitStack() as running:
        engines = [
            running.enter_context(
                StartedEngine(python_with("vllm"), "vllm", way, model, Path(name) / way)
            )
            for way in WAYS
        ]
        for concurrency in CONCURRENCY:
            ratios = []
            for number in range(runs + 1):
                order = engines[:: -1 if number % 2 else 1]
                rate = {each.way: each.ask(concurrency)["tokens_per_second"] for each in order}
                ratios.append(rate["piecegraph"] / rate["wrapped"])
            low, middle, high = quantiles(ratios[1:], n=4, method="inclusive")  # one is a warm-up
            ratio = {"median": round(middle, 3), "quartiles": (round(low, 3), round(high, 3))}
            yield {"family": model["family"], "requests": concurrency, **ratio}


if __name__ == "__main__":
    for family in sys.argv[1:] or FAMILIES:
        for row in rows({"layers": 4, "hidden": 128, "family": family}, runs=60):
            print(row, flush=True)
