"""Serving on a GPU for real: the reference engine under one capture strategy."""

from __future__ import annotations

import io

from rich.console import Console

from ... import CaptureStrategy
from ..serve.latency import between_tokens
from ..serve.options import RunOptions
from ..serve.run import bring_up, serve
from ..serve.run_arguments import read_run_options
from ..serve.workload import read_requests
from ._serving_result import ServingResult


def on_a_device(strategy: str, count: int) -> RunOptions:
    """The first `count` requests of the trace, all there at once, without compiling."""
    return read_run_options(
        model="small",
        dtype="bfloat16",
        device="cuda",
        requests=count,
        length_scale=0.2,
        strategy=strategy,
        max_num_tokens=2048,
        max_num_reqs=256,
        backend="eager",
        no_cache=True,
        verify="none",
    )


def serve_really(strategy: CaptureStrategy, count: int) -> ServingResult:
    """Bring the reference engine up, serve, and tell what came of it."""
    options = on_a_device(strategy.value, count)
    requests, console = read_requests(options), Console(file=io.StringIO())
    with bring_up(options, requests, [], console) as service:
        events = service.prepared.events
        ready = sum(span.seconds for span in events.spans if span.name == "capture")
        serve(service, requests, console)
        times = service.engine.served.token_times
        captures = events.named("capture")
        used = [row for row in service.prepared.report()["dispatch"] if row["mode"] != "NONE"]
        return ServingResult(
            ready=ready,
            first_token=[ready + moments[0] for moments in times.values()],
            inter_token=between_tokens(times),
            capture=sum(event.facts["ms"] for event in captures) / 1000,
            captured=len(captures),
            used=len(used),
            bytes=sum(event.facts["bytes"] for event in captures),
        )
