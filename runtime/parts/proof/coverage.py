"""Which step is proved next: one of the graphs with the fewest proofs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any

from ....config import Shadow
from ....dispatch import NO_GRAPH, RuntimeMode
from ...capture.installed_graph import InstalledGraph

MOST_STEPS = 10
"""Steps of a graph by which it is proved for the first time."""


class Coverage:
    """Proofs by graph index; `NO_GRAPH` is code without a graph.

    A graph is due from its first step on until it is proved, then one step in `every`. That is a
    step of a graph with the fewest proofs, if one comes within a tenth of that. Proofs take at most
    `share` of the time since the beginning: one whose expected time would exceed it has to wait,
    but the first one of a graph only until its tenth step. Later proofs wait for what that took.
    """

    def __init__(self, settings: Shadow, clock: Callable[[], float] = perf_counter) -> None:
        self.proofs: Counter[int] = Counter()
        self.covered: set[int] = set()
        """Graphs that are not due by themselves."""
        self.left = settings.every
        self.seconds = self.overdue_seconds = 0.0
        self._every, self._share = settings.every, settings.share
        self._clock, self._began = clock, clock()
        self._waited: Counter[int] = Counter()
        """Steps of each graph that is due by itself."""
        self._last: dict[int, int] = {}
        self._obstacles: dict[int, str] = {}
        self._fewest = self._number = 0

    def is_turn(self, graph_index: int) -> bool:
        """Whether a step that is due is one of those with the fewest proofs."""
        if graph_index not in self.covered:
            return True
        return self.left <= -(self._every // 10) or self.proofs[graph_index] <= self._fewest

    def is_overdue(self, graph_index: int) -> bool:
        """Whether a graph whose step this is was not proved in its tenth step, or in its 20th, 40th
        and so on if it could not be."""
        if graph_index in self.covered:
            return False
        self._waited[graph_index] += 1
        tens, rest = divmod(self._waited[graph_index], MOST_STEPS)
        return rest == 0 and tens.bit_count() == 1

    def has_time(self) -> bool:
        """Whether a proof stays within the share of the time."""
        expected = 1.5 * self.seconds / max(1, self._number)
        elapsed = self._clock() - self._began
        return self._share == 1 or self.seconds + expected <= self._share * elapsed

    def spend(self, seconds: float, is_overdue: bool) -> None:
        """Count the time of a proof."""
        self.seconds += seconds
        self.overdue_seconds += is_overdue and seconds

    def prove(self, graph_index: int, step: int) -> None:
        """A step was proved, after so many steps."""
        self.proofs[graph_index] += 1
        self._number += 1
        self._last[graph_index] = step
        self.settle(graph_index)

    def settle(self, graph_index: int) -> None:
        """The graph is due no more by itself."""
        self.covered.add(graph_index)
        self._fewest = min(self.proofs.values(), default=0)
        self.left = self._every

    def skip(self, graph_index: int, why: str) -> None:
        """A step that was due was not proved. The next one is, if its graph is not covered."""
        self._obstacles[graph_index] = why
        self.left = self._every

    def forget(self, graph_index: int) -> None:
        """The graph is another one from now on."""
        self.covered.discard(graph_index)
        for known in (self.proofs, self._last, self._obstacles, self._waited):
            known.pop(graph_index, None)

    def share(self) -> float:
        """The time that proofs took, as a share of all time."""
        return self.seconds / max(self._clock() - self._began, 1e-9)

    def rows(
        self, graphs: list[InstalledGraph], steps: dict[int, int], stopped: str | None
    ) -> list[dict[str, Any]]:
        """For each of `graphs`, and code without one if it served: `{mode, num_tokens, graph_index,
        steps, proved, last_step, not_yet}`. `steps` are those that each has served."""
        found: list[tuple[str, int | None, int]] = [
            (g.entry.mode.name, g.entry.descriptor.num_tokens, g.index) for g in graphs
        ]
        if steps.get(NO_GRAPH):
            found.append((RuntimeMode.NONE.name, None, NO_GRAPH))
        return [self._row(*each, steps.get(each[-1], 0), stopped) for each in found]

    def _row(
        self, mode: str, num_tokens: int | None, index: int, steps: int, stopped: str | None
    ) -> dict[str, Any]:
        why = "no step" if not steps else stopped or self._obstacles.get(index, "not due")
        return {
            "mode": mode, "num_tokens": num_tokens, "graph_index": index, "steps": steps,
            "proved": self.proofs[index], "last_step": self._last.get(index),
            "not_yet": None if self.proofs[index] else why,
        }  # fmt: skip
