"""How often each graph was used, why, and how much of it was padding; three additions a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..dispatch import NO_SLOT, Decision, DispatchPlan, Reason, RuntimeMode


class Usage:
    """Counts by slot, for steps without a graph by size, and reasons by runtime mode."""

    __slots__ = ("_plan", "_reasons", "_steps", "_tokens", "_without")

    def __init__(self, plan: DispatchPlan) -> None:
        self._plan = plan
        self._steps = [0] * len(plan.entries)
        self._tokens = [0] * len(plan.entries)
        self._without: Counter[int] = Counter()
        self._reasons: tuple[Counter[Reason], ...] = tuple(Counter() for _ in RuntimeMode)

    def count(self, decision: Decision, num_tokens: int) -> None:
        """One step of `num_tokens` real tokens, run as decided."""
        self._reasons[decision.mode][decision.reason] += 1
        slot = decision.slot
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

    def reasons(self) -> list[dict[str, Any]]:
        """`{mode, reason, count}`: how often each reason decided."""
        return [
            {"mode": mode.name, "reason": reason.value, "count": count}
            for mode in RuntimeMode
            for reason, count in sorted(self._reasons[mode].items())
        ]
