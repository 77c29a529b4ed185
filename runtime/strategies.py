"""Capture strategies as policy: which slots at startup, which between two steps.

| strategy | at startup                | between steps                                          |
|----------|---------------------------|--------------------------------------------------------|
| EAGER    | every slot                | none                                                   |
| DELAYED  | the largest of each mode  | the wanted slot if missing, else the next largest      |
| LAZY     | the largest of each mode  | the wanted slot once it has been wanted `min_hits` times |

The padded size decides, never the raw one: what is counted is the slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ..dispatch import DispatchPlan
from .config import CaptureStrategy


def startup_slots(strategy: CaptureStrategy, plan: DispatchPlan) -> list[int]:
    """Slots to capture at startup, in the plan's order: PIECEWISE before FULL, largest first."""
    if strategy is CaptureStrategy.EAGER:
        return list(range(len(plan.entries)))
    first: dict[object, int] = {}
    for slot, entry in enumerate(plan.entries):
        first.setdefault(entry.mode, slot)
    return sorted(first.values())


class StepPolicy:
    """What DELAYED and LAZY capture between steps; counts how often each slot was wanted."""

    def __init__(self, strategy: CaptureStrategy, plan: DispatchPlan, min_hits: int) -> None:
        self._strategy = strategy
        self._slots = range(len(plan.entries))
        self._min_hits = min_hits
        self._hits: Counter[int] = Counter()

    def next_slots(self, wanted: int, captured: Collection[int], budget: int) -> list[int]:
        """At most `budget` slots to capture now that a batch wants slot `wanted` (-1 for none)."""
        missing = [] if wanted < 0 or wanted in captured else [wanted]
        if self._strategy is CaptureStrategy.LAZY:
            self._hits.update(missing)
            return [slot for slot in missing if self._hits[slot] >= self._min_hits]
        if self._strategy is CaptureStrategy.EAGER:
            return []
        rest = [slot for slot in self._slots if slot not in captured and slot not in missing]
        return (missing + rest)[:budget]
