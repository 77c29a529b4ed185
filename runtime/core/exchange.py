"""What ranks agree by: each states facts on a topic and is given those of all.

A single process has `single_rank`. Every exchange on one rank has its counterpart on all others, in
the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Facts = Mapping[str, Any]

Exchange = Callable[[str, Facts], list[dict[str, Any]]]
"""Sends facts (JSON) on a topic to all ranks and returns those of each rank, by rank."""


def single_rank(topic: str, facts: Facts) -> list[dict[str, Any]]:
    """The exchange of a single process."""
    return [dict(facts)]


def worst_outcome(
    exchange: Exchange, topic: str, ms: float, num_bytes: int, reason: str
) -> tuple[float, int, str]:
    """The outcome of a capture on all ranks: the longest time, the most bytes, any failure."""
    outcomes = exchange(topic, {"ms": ms, "bytes": num_bytes, "reason": reason})
    failures = [f"rank {i}: {o['reason']}" for i, o in enumerate(outcomes) if o["reason"]]
    return (
        max(outcome["ms"] for outcome in outcomes),
        max(outcome["bytes"] for outcome in outcomes),
        reason if len(outcomes) == 1 else "; ".join(failures),
    )
