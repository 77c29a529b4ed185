"""The bytes that graphs may take, those they have taken, and which graphs to drop for it."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate

from ....dispatch import CapturePhase, DispatchPlan, RuntimeMode
from ...core.exchange import Exchange
from ...core.records import ForecastAccuracy, Records
from .forecast import Forecast, Graph
from .wanted import GraphState

WORST_FIT = 0.1
"""A forecast that may be wrong by more than this share is reported as uncertain."""


class GraphMemory:
    """Bytes of the captured graphs of `plan` by mode, their forecast, and the limit.

    `used` is what captures took less what was measured to be freed. It is not read from the device,
    where the engine allocates at the same time. `probed` is the forecast of the probes alone, which
    captures correct in `forecast`. `impossible` are graphs whose probe failed, and those of modes
    in which no graph could be probed.
    """

    def __init__(self, plan: DispatchPlan) -> None:
        self.limit: int | None = None
        self.forecast: Forecast | None = None
        self.impossible: set[int] = set()
        self.by_mode: dict[RuntimeMode, int] = {}
        self.probed: Forecast | None = None
        self._plan = plan
        self._captured: list[Graph] = []
        self._traffic: list[float] = []

    @property
    def used(self) -> int:
        return sum(self.by_mode.values())

    @property
    def exceeded(self) -> bool:
        """Whether the graphs take more than the limit."""
        return self.limit is not None and self.used > self.limit

    def took(self, graph_index: int, num_bytes: int) -> None:
        """Add a captured graph, and correct the forecast by what it took."""
        graph = graph_of(self._plan, graph_index)
        if self.forecast is not None and graph[0] in self.forecast.modes:
            self.forecast = self.forecast.corrected(
                graph, self._forecast_graphs(self._captured), num_bytes
            )
        self._captured.append(graph)
        self.by_mode[graph[0]] = self.by_mode.get(graph[0], 0) + num_bytes

    def freed(self, graph_index: int, num_bytes: int) -> None:
        """Subtract a graph. `num_bytes` is what was freed; memory that other graphs share stays."""
        graph = graph_of(self._plan, graph_index)
        self._captured.remove(graph)
        self.by_mode[graph[0]] -= num_bytes

    def pool_freed(self) -> None:
        """All graphs and their pool are gone."""
        self._captured.clear()
        self.by_mode = dict.fromkeys(self.by_mode, 0)

    def admits(self, graph_index: int) -> bool:
        """Whether the limit is expected to hold with one more graph."""
        mode = self._plan.entries[graph_index].mode
        if self.limit is None or self.forecast is None or mode not in self.forecast.modes:
            return not self.exceeded
        return self.used + self.growth(graph_index) <= self.limit

    def growth(self, graph_index: int) -> int:
        """Forecast bytes of one more graph."""
        assert self.forecast is not None
        graph = graph_of(self._plan, graph_index)
        return self.forecast.growth(graph, self._forecast_graphs(self._captured))

    def within_shares(self, states: Sequence[GraphState]) -> Iterator[int]:
        """The graphs of the plan's phases that fit into their shares of the limit, in order; each
        is captured before the next is asked for."""

        def taken(i: int) -> int | None:
            state = states[i]
            failed = i in self.impossible or state.failures
            return state.bytes if state.captured else 0 if failed else None

        assert self.limit is not None
        return within_shares(self._plan.phases, self.limit, taken, self.growth)

    def _forecast_graphs(self, graphs: Iterable[Graph]) -> list[Graph]:
        """Those of modes with a forecast: a change of the plan may add a mode."""
        assert self.forecast is not None
        return [graph for graph in graphs if graph[0] in self.forecast.modes]

    def plan_limit(
        self,
        limit: int | None,
        counts: Sequence[int],
        exchange: Exchange,
        records: Records,
    ) -> Collection[int]:
        """Set the limit; returns the graphs to drop so that the forecast of the rest keeps it.

        `counts` are the steps of 0, 1, … tokens so far, if known. All ranks use the smallest limit
        and the sum of their steps.
        """
        answers = exchange("memory limit", {"limit": limit, "traffic": list(counts)})
        self.limit = limit and min(answer["limit"] for answer in answers)
        by_rank = [answer["traffic"] for answer in answers]
        self._traffic = [sum(of_size) for of_size in zip(*by_rank, strict=True)]
        pruned = self.to_drop()
        lost = [*sorted(self.impossible), *pruned]
        kept = [i for i in range(len(self._plan.entries)) if i not in lost]
        num_bytes, margin = self.forecast_of(kept)
        entries = [self._plan.entries[i].as_json() for i in lost]
        planned = {"bytes": num_bytes, "margin": margin}
        records.events.emit(
            "memory.forecast", level=logging.INFO, limit=self.limit, **planned, dropped=entries
        )
        if margin > WORST_FIT * num_bytes:
            records.events.emit("memory.uncertain", level=logging.WARNING, **planned)
        return lost

    def to_drop(self) -> list[int]:
        """Graphs to drop so that the others are forecast to fit, the least useful first."""
        if self.limit is None or self.forecast is None:
            return []
        possible = [i for i in range(len(self._plan.entries)) if i not in self.impossible]
        if not self._plan.phases:
            return prune(self._plan, possible, self.forecast, self.limit, self._traffic)
        forecast, kept = self.forecast, list[Graph]()
        bytes_of: dict[int, int] = dict.fromkeys(self.impossible, 0)

        def growth(i: int) -> int:
            return forecast.growth(graph_of(self._plan, i), kept)

        for i in within_shares(self._plan.phases, self.limit, bytes_of.get, growth):
            bytes_of[i] = growth(i)
            kept.append(graph_of(self._plan, i))
        ordered = [i for phase in self._plan.phases for i in phase.order]
        return [i for i in reversed(ordered) if i not in bytes_of]

    def too_large(self, states: Sequence[GraphState]) -> list[int]:
        """Captured graphs to drop so that at least half of the plan fits, by the corrected
        forecast; none while half of it is captured."""
        planned = [state.captured for state in states if not state.dropped]
        if 2 * sum(planned) >= len(planned):
            return []
        return [i for i in self.to_drop() if states[i].captured]

    def forecast_of(self, indices: Iterable[int]) -> tuple[int, int]:
        """Forecast bytes of the graphs `indices` alone, and by how much that may be wrong."""
        assert self.forecast is not None
        graphs = self._forecast_graphs(graph_of(self._plan, i) for i in indices)
        return self.forecast.total(graphs), self.forecast.margin(graphs)

    def expected(self, indices: Iterable[int]) -> tuple[int, int]:
        """Bytes once all of `indices` are captured, and by how much that may be wrong."""
        forecast, margin = self.forecast_of(indices)
        expected, limit = max(self.used, forecast), self.limit
        # the limit holds even if the forecast is wrong
        return expected, margin if limit is None else max(0, min(margin, limit - expected))

    def accuracy(self, captured: Iterable[int]) -> ForecastAccuracy:
        """What the probes alone forecast for the `captured` graphs, and what these took."""
        assert self.probed is not None
        graphs = self._forecast_graphs(graph_of(self._plan, i) for i in captured)
        expected = self.probed.total(graphs)
        return ForecastAccuracy(expected, self.used, self.used / expected if expected else None)


def graph_of(plan: DispatchPlan, graph_index: int) -> Graph:
    """Mode and size of a graph of the plan."""
    entry = plan.entries[graph_index]
    return entry.mode, entry.descriptor.num_tokens


def prune(
    plan: DispatchPlan,
    indices: Sequence[int],
    forecast: Forecast,
    limit: int,
    traffic: Sequence[float] = (),
) -> list[int]:
    """Graphs to drop so that the others are forecast to take at most `limit` bytes.

    If memory is left, capture them in reverse order. What saves most per byte is kept first. A size
    saves padding: without it its batches use the next larger graph of the mode; without a larger
    one they use no graph, which counts like padding as long as the largest batch. `traffic` counts
    the batches of 0, 1, … tokens; without any, size n is assumed to occur with frequency 1/n.
    """
    graphs = {i: graph_of(plan, i) for i in indices}
    largest = max((n for _, n in graphs.values()), default=0)
    weights = traffic if any(traffic) else [1 / max(n, 1) for n in range(plan.largest + 1)]
    up_to = list(accumulate(weights))
    sizes: dict[RuntimeMode, list[int]] = {mode: [0] for mode, _ in graphs.values()}
    own = {i: forecast.own(graph) for i, graph in graphs.items()}
    shared = {i: forecast.shared([graph]) for i, graph in graphs.items()}
    working = 0.0

    def saved_per_byte(i: int) -> tuple[float, int]:
        """Of equal ones the smaller comes first."""
        mode, n = graphs[i]
        place = bisect_left(sizes[mode], n)
        above = sizes[mode][place] if place < len(sizes[mode]) else n + largest
        batches = up_to[n] - up_to[sizes[mode][place - 1]]
        growth = own[i] + max(0.0, shared[i] - working)
        return batches * (above - n) / max(1.0, growth), -n

    kept, dropped, left = list[int](), list[int](), list(indices)
    while left:
        best = max(left, key=saved_per_byte)
        left.remove(best)
        if forecast.total([graphs[i] for i in (*kept, best)]) <= limit:
            kept.append(best)
            insort(sizes[graphs[best][0]], graphs[best][1])
            working = max(working, shared[best])
        else:
            dropped.append(best)
    return dropped[::-1]


def within_shares(
    phases: Sequence[CapturePhase],
    limit: float,
    taken: Callable[[int], float | None],
    estimate: Callable[[int], float],
) -> Iterator[int]:
    """The graphs to capture, each phase in its order and within its share of `limit` bytes.

    A graph that does not fit is passed over, since a later one may. What is left of the limit goes
    to a phase once the others are complete. `taken` gives the bytes of a graph, None until it is
    captured, which is before the next graph is asked for; `estimate` what it would take. A graph
    whose capture released memory counts as none.
    """

    def bytes_of(*graphs: int) -> float:
        return sum(max(0, taken(i) or 0) for i in graphs)

    def fitting(phase: CapturePhase, left: float) -> Iterator[int]:
        for i in phase.order:
            if taken(i) is None and estimate(i) < left:
                yield i
                left -= bytes_of(i)

    for phase in phases:
        yield from fitting(phase, phase.share * limit - bytes_of(*phase.order))
    for phase in phases:
        others = [i for other in phases if other is not phase for i in other.order]
        if all(taken(i) is not None for i in others):
            yield from fitting(phase, limit - bytes_of(*phase.order, *others))
