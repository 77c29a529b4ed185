"""Where the time of a startup went, as rows for the page."""

from __future__ import annotations

from typing import Any

from ... import Events

OTHER_SECONDS, OTHER_SHARE = 0.01, 0.02
"""Time inside a span that no child span covers is shown from this duration."""

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
