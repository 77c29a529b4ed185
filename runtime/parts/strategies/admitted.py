"""Limits on captures: their number between two steps, idle time, bytes of lazy recordings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ....dispatch import PlanEntry, RuntimeMode
from .wanted import GraphState


class CaptureBudget:
    """What is left for captures in one gap: a number of them, and milliseconds by estimate."""

    def __init__(self, captures: int, ms: float = math.inf) -> None:
        self.captures = captures
        self.ms = ms

    def spend(self, ms: float) -> None:
        """Subtract one capture that took `ms`."""
        self.captures -= 1
        self.ms -= ms


def worth(hits: int, launches: int, num_bytes: int) -> float:
    """Launches saved per byte: recent uses, times the launches that one replay saves the host.

    A recording that takes no memory is always kept.
    """
    return math.inf if num_bytes <= 0 else hits * launches / num_bytes


class LazyBytes:
    """The limit on recordings captured after startup; those worth least are evicted first.

    Evicting from a shared pool is safe, since no recording reads what another one leaves in the
    pool. The pool shrinks by less than the recording added, so what is freed is measured.
    `limit` None is no limit. `evict` frees one graph.
    """

    def __init__(
        self,
        limit: int | None,
        states: Sequence[GraphState],
        entries: Sequence[PlanEntry],
    ) -> None:
        self.limit = limit
        self._states = states
        self.entries = entries
        self._expected: dict[RuntimeMode, int] = {}

    def make_room(self, graph_index: int, evict: Callable[[int], None]) -> bool:
        """Evict what is worth less than graph `graph_index` until it fits; whether it fits."""
        if self.limit is None:
            return True
        mode = self.entries[graph_index].mode
        expected = self._expected.get(mode, 0)
        if expected > self.limit:
            return False
        # launches do not depend on the size: those of any recording of the mode
        launches = max(
            (
                state.launches
                for state, entry in zip(self._states, self.entries, strict=True)
                if entry.mode is mode
            ),
            default=1,
        )
        value = worth(self._states[graph_index].hits, launches, expected)
        while self._used() + expected > self.limit:
            least = self._least_worth()
            if least is None or self._worth(least) >= value:
                return False
            evict(least)
        return True

    def took(self, graph_index: int, evict: Callable[[int], None]) -> None:
        """Learn from a capture, and evict what is worth least while the limit is exceeded."""
        if self.limit is None:
            return
        self._expected[self.entries[graph_index].mode] = self._states[graph_index].bytes
        while self._used() > self.limit:
            least = self._least_worth()
            assert least is not None
            evict(least)

    def _used(self) -> int:
        return sum(state.bytes for state in self._states if state.on_use)

    def _worth(self, graph_index: int) -> float:
        state = self._states[graph_index]
        return worth(state.hits, state.launches, state.bytes)

    def _least_worth(self) -> int | None:
        lazy = [i for i, state in enumerate(self._states) if state.on_use]
        return min(lazy, key=lambda i: (self._worth(i), i), default=None)
