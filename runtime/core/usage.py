"""The counter of steps: how often each graph and size was used, why, and how much was padding."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...dispatch import NO_GRAPH, Decision, DispatchPlan, Reason, RuntimeMode

_MOST_KEPT = 4096


class _Tally:
    """Steps that were run by one decision object."""

    __slots__ = ("decision", "steps", "tokens")

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.steps = 0
        self.tokens = 0


class IdleSteps:
    """Batches of one decision for which there is nothing to capture, of `num_reqs` or more.

    They want graph `wanted`. They are counted when they are dispatched, alike on all ranks; a rank
    may run them by another decision.
    """

    __slots__ = ("decision", "num_reqs", "steps", "wanted")

    def __init__(self, decision: Decision, wanted: int, num_reqs: int) -> None:
        self.decision = decision
        self.wanted = wanted
        self.num_reqs = num_reqs
        self.steps = 0


class Usage:
    """Counts by graph, by number of real tokens, and reasons by runtime mode.

    A step costs one look-up by the identity of its decision, since the dispatcher reuses decision
    objects. Decisions are summed when counts are read, or when there are many.
    """

    __slots__ = ("_graphs", "_plan", "_reasons", "_sizes", "_tallies", "_without")

    def __init__(self, plan: DispatchPlan) -> None:
        self._plan = plan
        self._tallies: dict[int, _Tally] = {}
        self._graphs: dict[int, tuple[int, int]] = {}
        """Steps and tokens by graph index."""
        self._without: Counter[int] = Counter()
        self._sizes: Counter[int] = Counter()
        self._reasons: Counter[tuple[RuntimeMode, Reason]] = Counter()

    def follow(self, plan: DispatchPlan) -> None:
        """Count for another plan from now on; no graph was used so far."""
        self._sum()
        self._plan = plan

    def count(self, decision: Decision, num_tokens: int) -> None:
        """One step of `num_tokens` real tokens, run as decided."""
        tally = self._tallies.get(id(decision))
        if tally is None:
            if len(self._tallies) >= _MOST_KEPT:
                self._sum()
            tally = self._tallies[id(decision)] = _Tally(decision)
        tally.steps += 1
        tally.tokens += num_tokens

    def counts(self, largest: int) -> list[int]:
        """How many steps of 0 to `largest` real tokens were run."""
        self._sum()
        return [self._sizes[num_tokens] for num_tokens in range(largest + 1)]

    def by_graph(self) -> dict[int, int]:
        """Steps by graph index."""
        self._sum()
        steps = {graph_index: steps for graph_index, (steps, _) in self._graphs.items()}
        return {**steps, NO_GRAPH: self._without.total()}

    def rows(self) -> list[dict[str, Any]]:
        """`{mode, num_tokens, count, padded_tokens}`: graphs first, each sorted by size.

        Rows of graphs have their `descriptor`.
        """
        self._sum()
        used: list[dict[str, Any]] = []
        for graph_index, (steps, tokens) in sorted(self._graphs.items()):
            entry = self._plan.entries[graph_index]
            size = entry.descriptor.num_tokens
            descriptor = {"descriptor": entry.descriptor.as_json()}
            used.append(_row(entry.mode, size, steps, steps * size - tokens) | descriptor)
        used.sort(key=lambda row: (row["mode"], row["num_tokens"]))
        without = sorted(self._without.items())
        return used + [_row(RuntimeMode.NONE, size, steps, 0) for size, steps in without]

    def reasons(self) -> list[dict[str, Any]]:
        """`{mode, reason, count}`: how often each reason was decisive."""
        self._sum()
        return [
            {"mode": mode.name, "reason": reason.value, "count": count}
            for (mode, reason), count in sorted(self._reasons.items())
        ]

    def _sum(self) -> None:
        tallies, self._tallies = self._tallies, {}
        for tally in tallies.values():
            decision, graph_index = tally.decision, tally.decision.graph_index
            self._reasons[decision.mode, decision.reason] += tally.steps
            self._sizes[round(tally.tokens / tally.steps)] += tally.steps
            if graph_index == NO_GRAPH:
                self._without[decision.descriptor.num_tokens] += tally.steps
            else:
                steps, tokens = self._graphs.get(graph_index, (0, 0))
                self._graphs[graph_index] = steps + tally.steps, tokens + tally.tokens


def _row(mode: RuntimeMode, size: int, steps: int, padded: int) -> dict[str, Any]:
    return {"mode": mode.name, "num_tokens": size, "count": steps, "padded_tokens": padded}
