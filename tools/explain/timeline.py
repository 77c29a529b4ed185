"""Where the time of a startup went: as rows for the page, as a Chrome trace with the first steps.

Chrome traces are for chrome://tracing and ui.perfetto.dev. Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ... import Events
from ..engine.serving_log import StepRecord

OTHER_SECONDS, OTHER_SHARE = 0.01, 0.02
"""Time inside a span that no child span covers is shown from this duration."""

STARTUP, STEPS = 1, 2
MAX_STEPS = 1000

Facts = dict[str, Any]


def timeline(events: Events) -> list[Facts]:
    """Spans in order of their start, in seconds since the events began.

    A span that its parts do not fill gets a row `other`, so that its parts add up to it. They are
    without pieces that workers compiled meanwhile.
    """
    spans = sorted(events.spans, key=lambda span: (span.start, span.depth))
    rows: list[Facts] = []
    for index, span in enumerate(spans):
        end = span.start + span.seconds
        inside = [each for each in spans[index + 1 :] if each.start <= end]
        parts = [
            each.seconds
            for each in inside
            if each.depth == span.depth + 1 and each.facts.get("by") != "worker"
        ]
        rows.append(_row(span.name, span.start, span.seconds, span.depth, span.facts))
        other = span.seconds - sum(parts)
        if parts and other > max(OTHER_SECONDS, OTHER_SHARE * span.seconds):
            facts = {"in": span.name}
            rows.append(_row("other", span.start, other, span.depth + 1, facts))
    return rows


def _row(name: str, start: float, seconds: float, depth: int, facts: Facts) -> Facts:
    text = " ".join(f"{name}={value}" for name, value in facts.items())
    return {"name": name, "start": start, "seconds": seconds, "depth": depth, "facts": text}


def chrome_trace(events: Events, steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Spans and events of the startup on one track, steps (at most MAX_STEPS) on another.

    Steps follow each other without the time between them: what the engine's clock measured.
    """
    end = max((span.start + span.seconds for span in events.spans), default=0.0)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            _named("process_name", 0, "piecegraph"),
            _named("thread_name", STARTUP, "startup"),
            _named("thread_name", STEPS, "steps"),
            *_spans(events),
            *_instants(events),
            *_steps(steps[:MAX_STEPS], end),
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
