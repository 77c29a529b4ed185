"""What does it cost to be ready early? The reference engine under each capture strategy.

Captures and steps are real: of the replay backend where there is no GPU. All requests of an excerpt
of the Azure trace arrive at the start, and times count from there. The strategies take turns.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from piecegraph.dispatch import CaptureStrategy
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.report import between_tokens
from piecegraph.tools.serve.requests import read_requests
from piecegraph.tools.serve.run import serve, start_service

RATIOS = {
    "delayed_ready_over_eager": ("DELAYED", "ready_ms"),
    "lazy_ready_over_eager": ("LAZY", "ready_ms"),
    "delayed_captures_over_eager": ("DELAYED", "capture_ms"),
    "lazy_captures_over_eager": ("LAZY", "capture_ms"),
}


def run(quick: bool) -> dict[str, Any]:
    """Rows in milliseconds, medians over rounds; ratios of time to ready and of all captures."""
    rounds, requests = (1, 12) if quick else (5, 64)
    _serve(CaptureStrategy.EAGER, 1)  # what is imported and built once
    runs = [{each: _serve(each, requests) for each in CaptureStrategy} for _ in range(rounds)]
    return {
        "ratios": {
            name: median(
                each[CaptureStrategy[strategy]][time] / each[CaptureStrategy.EAGER][time]
                for each in runs
            )
            for name, (strategy, time) in RATIOS.items()
        },
        "rows": [
            {"strategy": strategy.name}
            | {name: median(each[strategy][name] for each in runs) for name in runs[0][strategy]}
            for strategy in CaptureStrategy
        ],
    }


def _serve(strategy: CaptureStrategy, count: int) -> dict[str, float]:
    """Start the engine without compiling and serve `count` requests."""
    on_gpu = torch.cuda.is_available()
    options = read_run_options(
        model="small" if on_gpu else "tiny",
        dtype="bfloat16" if on_gpu else "float32",
        device="cuda" if on_gpu else "cpu",
        requests=count,
        strategy=strategy.value,
        backend="eager",
        no_cache=True,
        verify="none",
    )
    requests, console = read_requests(options), Console(file=io.StringIO())
    with start_service(options, requests, [], console) as service:
        phases = service.prepared.report()["startup"]["phases"]
        ready = sum(phase["seconds"] for phase in phases if phase["name"] == "capture")
        serve(service, requests, console)
        times, report = service.engine.log.token_times, service.prepared.report()
    captures, dispatch = report["captures"], report["dispatch"]
    return {
        "ready_ms": 1000 * ready,
        **_latency("first", [ready + moments[0] for moments in times.values()]),
        **_latency("inter", between_tokens(times)),
        "captured": len(captures),
        "used": sum(row["mode"] != "NONE" for row in dispatch),
        "capture_ms": sum(capture["ms"] for capture in captures),
        "MiB": sum(capture["bytes"] for capture in captures) / (1 << 20),
    }


def _latency(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and worst, in milliseconds."""
    ms = np.array(seconds) * 1000
    return {
        f"{name}_median_ms": float(np.median(ms)),
        f"{name}_p99_ms": float(np.percentile(ms, 99)),
        f"{name}_worst_ms": float(ms.max()),
    }
