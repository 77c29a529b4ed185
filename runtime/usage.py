"""How often each graph was used and how much of it was padding; two additions a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..dispatch import NO_SLOT, DispatchPlan


class Usage:
    """Counts by slot, and for steps without a graph by size."""

    __slots__ = ("_plan", "_steps", "_tokens", "_without")

    def __init__(self, plan: DispatchPlan) -> None:
        self._plan = plan
        self._steps = [0] * len(plan.entries)
        self._tokens = [0] * len(plan.entries)
        self._without: Counter[int] = Counter()

    def count(self, slot: int, num_tokens: int) -> None:
        """One step of `num_tokens` real tokens in the graph of `slot`."""
        if slot == NO_SLOT:
            self._without[num_tokens] += 1
        else:
            self._steps[slot] += 1
            self._tokens[slot] += num_tokens

    def rows(self) -> list[dict[str, Any]]:
        """`{mode, num_tokens, count, padded_tokens}`, graphs first, each in order of size."""
        used = [
            {
                "mode": entry.mode.name,
                "num_tokens": entry.descriptor.num_tokens,
                "count": steps,
                "padded_tokens": steps * entry.descriptor.num_tokens - tokens,
            }
            for entry, steps, tokens in zip(
                self._plan.entries, self._steps, self._tokens, strict=True
            )
            if steps
        ]
        used.sort(key=lambda row: (row["mode"], row["num_tokens"]))
        return used + [
            {"mode": "NONE", "num_tokens": size, "count": count, "padded_tokens": 0}
            for size, count in sorted(self._without.items())
        ]
