"""The main job's report as data; docs/report.md documents every key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..engine.engine import Served
from ..engine.scheduler import Request
from .latency import summarise, token_latencies
from .options import RunOptions
from .verify import Verification

SCHEMA = 1

Report = dict[str, Any]


def build_report(
    *,
    options: RunOptions,
    prepared: Report,
    phases: Sequence[tuple[str, float]],
    requests: Sequence[Request],
    served: Served,
    verification: Verification,
) -> Report:
    """Put what the library reports (`prepared`) beside what the engine saw.

    `phases` are the main job's own, in seconds, before the library's.
    """
    own_phases = [{"name": name, "seconds": seconds} for name, seconds in phases]
    startup = prepared["startup"]
    arrivals = {request.id: request.arrival for request in requests}
    return {
        "schema": SCHEMA,
        "versions": {name: _version(name) for name in ("piecegraph", "torch")},
        "options": _options(options),
        **prepared,
        "startup": {**startup, "phases": own_phases + startup["phases"]},
        "serving": _serving(requests, served),
        "latency": {
            **token_latencies(arrivals, served.token_times),
            "step": summarise([step.seconds for step in served.steps]),
        },
        "verification": _verification(verification),
    }


def _serving(requests: Sequence[Request], served: Served) -> Report:
    seconds = sum(step.seconds for step in served.steps)
    generated = sum(len(times) for times in served.token_times.values())
    return {
        "requests": len(requests),
        "prompt_tokens": sum(request.num_prompt for request in requests),
        "generated_tokens": generated,
        "steps": len(served.steps),
        "preemptions": sum(step.num_preempted for step in served.steps),
        "seconds": seconds,
        "generated_tokens_per_second": generated / seconds,
        "requests_per_second": len(requests) / seconds,
    }


def _verification(verification: Verification) -> Report:
    return {
        "ok": verification.ok,
        "steps": verification.steps,
        "max_abs_diff": verification.max_abs_diff,
        "mismatch": verification.mismatch and verification.mismatch.as_json(),
    }


def _options(options: RunOptions) -> Report:
    return {
        name: str(fact) if isinstance(fact, Path) else fact
        for name, fact in asdict(options).items()
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return None
