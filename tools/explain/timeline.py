"""A startup and its first steps as a Chrome trace, for chrome://tracing and ui.perfetto.dev.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ... import Events
from ..engine.engine import StepRecord

STARTUP, STEPS = 1, 2
MAX_STEPS = 1000


def chrome_trace(events: Events, steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Spans and events of the startup on one track, steps (at most MAX_STEPS) on another.

    Steps follow each other without the time between them: what the engine's clock measured.
    """
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            _named("process_name", 0, "piecegraph"),
            _named("thread_name", STARTUP, "startup"),
            _named("thread_name", STEPS, "steps"),
            *_spans(events),
            *_instants(events),
            *_steps(steps[:MAX_STEPS], _end(events)),
        ],
    }


def _spans(events: Events) -> Iterable[dict[str, Any]]:
    for span in events.spans:
        yield _complete(span.name, STARTUP, span.start, span.seconds, span.facts)


def _instants(events: Events) -> Iterable[dict[str, Any]]:
    for event in events.events:
        args = {name: str(value)[:2000] for name, value in event.facts.items()}
        yield {
            "ph": "i",
            "s": "t",
            "name": event.name,
            "pid": 0,
            "tid": STARTUP,
            "ts": event.at * 1e6,
            "args": args,
        }


def _steps(steps: Sequence[StepRecord], start: float) -> Iterable[dict[str, Any]]:
    for step in steps:
        facts = {
            "num_tokens": step.num_tokens,
            "padded_tokens": step.padded_tokens,
            "num_reqs": step.num_reqs,
        }
        yield _complete(f"{step.mode} {step.padded_tokens}", STEPS, start, step.seconds, facts)
        start += step.seconds


def _end(events: Events) -> float:
    return max((span.start + span.seconds for span in events.spans), default=0.0)


def _complete(
    name: str, track: int, start: float, seconds: float, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": 0,
        "tid": track,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "args": facts,
    }


def _named(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": track, "args": {"name": name}}
