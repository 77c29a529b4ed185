"""What does it cost to be ready early? The Azure trace under each capture strategy.

On a GPU the reference engine serves the requests. Without one, captures and steps take modeled
times (`_serving`), scheduling, dispatch and strategies are the real ones, and requests begin to
arrive when the startup begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import CaptureStrategy, Config
from ..engine.scheduler import Request
from ..report.output import figure_class
from ..serve.requests import EXCERPT, read_trace
from ._serving import ServingResult, serve_modeled, serve_on_gpu

MAX_NUM_TOKENS, MAX_NUM_REQS = 2048, 256
MODELED = "without a GPU the times of steps and captures are modeled, not measured"


def run(quick: bool) -> dict[str, Any]:
    """A row for each strategy in milliseconds; ratios of time to ready and of all capture time."""
    requests = 60 if quick else 400
    if torch.cuda.is_available():
        served = {strategy: serve_on_gpu(strategy, requests) for strategy in CaptureStrategy}
    else:
        served = {strategy: _modeled(strategy, requests) for strategy in CaptureStrategy}
    eager, delayed = served[CaptureStrategy.EAGER], served[CaptureStrategy.DELAYED]
    lazy = served[CaptureStrategy.LAZY]
    note = {} if torch.cuda.is_available() else {"note": MODELED}
    return {
        "modeled": not torch.cuda.is_available(),
        **note,
        "ratios": {
            "lazy_ready_over_eager": lazy.ready / eager.ready,
            "delayed_ready_over_eager": delayed.ready / eager.ready,
            "delayed_total_over_eager": delayed.capture / eager.capture,
        },
        "rows": [_row(strategy.value, result) for strategy, result in served.items()],
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars: time to ready and latencies of each strategy, on a logarithmic scale."""
    figure = figure_class()(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    rows = result["rows"]
    names = [name for name in rows[0] if name.endswith("_ms")]
    for index, row in enumerate(rows):
        places = np.arange(len(names)) + 0.27 * (index - 1)
        axes.bar(places, [max(row[name], 0.1) for name in names], 0.25, label=row["strategy"])
    axes.set_yscale("log")
    axes.set_ylabel("ms, modeled" if result["modeled"] else "ms")
    axes.set_xticks(np.arange(len(names)), [name[:-3].replace("_", "\n") for name in names])
    axes.legend()
    figure.savefig(path)


def _modeled(strategy: CaptureStrategy, count: int) -> ServingResult:
    config = Config(
        strategy=strategy, max_num_tokens=MAX_NUM_TOKENS, max_num_reqs=MAX_NUM_REQS, min_hits=2
    )
    rows = read_trace(EXCERPT, limit=count)
    requests = [
        Request(number, [0] * row.num_prompt, row.num_generate, row.arrival)
        for number, row in enumerate(rows)
    ]
    return serve_modeled(config, requests)


def _row(strategy: str, served: ServingResult) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "ready_ms": served.ready * 1000,
        **_summary("first", served.first_token),
        **_summary("inter", served.inter_token),
        "captured": served.captured,
        "used": served.used,
        "capture_ms": served.capture * 1000,
        "MiB": served.bytes / (1 << 20),
    }


def _summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and worst, in milliseconds."""
    ms = np.array(seconds) * 1000
    return {
        f"{name}_median_ms": float(np.median(ms)),
        f"{name}_p99_ms": float(np.percentile(ms, 99)),
        f"{name}_worst_ms": float(ms.max()),
    }
