"""How much capturing one gap between steps may hold: a number of captures and their time."""

from __future__ import annotations

import math

from ...dispatch import RuntimeMode


class CaptureCosts:
    """Milliseconds that captures took, by mode and size; foretells those to come."""

    def __init__(self) -> None:
        self._measured: dict[RuntimeMode, dict[int, float]] = {}

    def measured(self, mode: RuntimeMode, num_tokens: int, ms: float) -> None:
        self._measured.setdefault(mode, {})[num_tokens] = ms

    def estimate(self, mode: RuntimeMode, num_tokens: int) -> float:
        """The cost of the nearest size measured for the mode, the larger of two; 0 without any.

        Capturing is host work, one launch after another: sizes differ little, modes much.
        """
        known = self._measured.get(mode, {})
        nearest = min(known, key=lambda n: (abs(n - num_tokens), -n), default=None)
        return 0.0 if nearest is None else known[nearest]


class CaptureBudget:
    """What is left for captures in one gap. `ms` bounds the stall by estimates made before."""

    def __init__(self, captures: int, ms: float | None) -> None:
        self._captures = captures
        self._ms = math.inf if ms is None else ms

    @property
    def spent(self) -> bool:
        """Whether no capture at all may follow; one that is quick enough may otherwise."""
        return self._captures <= 0

    def admits(self, estimate: float) -> bool:
        """Whether a capture of `estimate` milliseconds fits into the time."""
        return estimate <= self._ms

    def spend(self, ms: float) -> None:
        """One capture took `ms`."""
        self._captures -= 1
        self._ms -= ms
