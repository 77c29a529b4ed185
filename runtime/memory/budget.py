"""The bytes that graphs may take, those they have taken, and which graphs to give up for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...dispatch import DispatchPlan, Histogram, RuntimeMode
from ...events import Events
from ..backends.protocol import GraphBackend, Memory
from ..records import PlannedMemory, Records
from .forecast import Forecast, RecordGraph, forecast_memory

Exchange = Callable[[str, Mapping[str, Any]], list[dict[str, Any]]]
"""Sends facts on a topic to all ranks and returns those of each rank, by rank."""


def limit_in_bytes(limit: int | float | None, memory: Memory) -> int | None:
    """`Config.memory_limit` in bytes: a float is a fraction of free memory."""
    return int(limit * memory.free) if isinstance(limit, float) else limit


class GraphMemory:
    """Bytes of captured graphs by mode, their forecast, and the limit.

    `used` is what captures took less what was measured to be freed. It is not read from the device,
    where the engine allocates at the same time. `impossible` are graphs whose probe failed, and
    those of modes in which no graph could be probed.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.forecast: Forecast | None = None
        self.impossible: set[int] = set()
        self.by_mode: dict[RuntimeMode, int] = {}

    @property
    def used(self) -> int:
        return sum(self.by_mode.values())

    def took(self, mode: RuntimeMode, num_bytes: int) -> None:
        """Add the bytes of a capture; negative for what an eviction freed."""
        self.by_mode[mode] = self.by_mode.get(mode, 0) + num_bytes

    def growth(self, mode: RuntimeMode, num_tokens: int) -> int:
        """Expected bytes of one more graph; 0 if nothing was probed."""
        if self.forecast is None or mode not in self.forecast.modes:
            return 0
        first = mode not in self.by_mode
        return self.forecast.growth(mode, num_tokens, first=first, used=self.used)

    def admits(self, mode: RuntimeMode, num_tokens: int) -> bool:
        """Whether the limit is expected to hold with one more graph."""
        return self.limit is None or self.used + self.growth(mode, num_tokens) <= self.limit

    def probe(
        self,
        plan: DispatchPlan,
        backend: GraphBackend,
        record: RecordGraph,
        exchange: Exchange,
        events: Events,
    ) -> None:
        """Forecast what the graphs of `plan` take; all ranks use the largest of their forecasts."""
        indices = range(len(plan.entries))
        forecast, failed = forecast_memory(backend, plan, indices, record, events)
        answers = exchange("forecast", {"forecast": forecast.as_json(), "failed": failed})
        self.forecast = Forecast.worst([answer["forecast"] for answer in answers])
        self.impossible = {i for answer in answers for i in answer["failed"]}
        self.impossible |= {i for i in indices if plan.entries[i].mode not in self.forecast.modes}

    def plan_limit(
        self,
        limit: int | None,
        plan: DispatchPlan,
        histogram: Histogram | None,
        exchange: Exchange,
        records: Records,
    ) -> Collection[int]:
        """Set the limit; returns the graphs to drop so that the forecast of the rest keeps it.

        `histogram` counts the batch sizes seen so far, if known. All ranks use the smallest limit
        and the sum of their traffic.
        """
        assert self.forecast is not None
        own = histogram.counts(plan.largest) if histogram is not None else []
        answers = exchange("memory limit", {"limit": limit, "traffic": own})
        self.limit = limit and min(answer["limit"] for answer in answers)
        indices = range(len(plan.entries))
        pruned: list[int] = []
        if self.limit is not None:
            counts = [answer["traffic"] for answer in answers]
            traffic = [sum(of_size) for of_size in zip(*counts, strict=True)]
            possible = [i for i in indices if i not in self.impossible]
            pruned = prune(plan, possible, self.forecast, self.limit, traffic)
        dropped = self.impossible.union(pruned)
        kept = [i for i in indices if i not in dropped]
        lost = [plan.entries[i].as_json() for i in (*sorted(self.impossible), *pruned)]
        records.add(PlannedMemory(self.limit, self.forecast_of(plan, kept), lost))
        return dropped

    def forecast_of(self, plan: DispatchPlan, indices: Collection[int]) -> int:
        """Forecast bytes of the graphs `indices` alone."""
        sizes: dict[RuntimeMode, list[int]] = {}
        for graph_index in indices:
            entry = plan.entries[graph_index]
            sizes.setdefault(entry.mode, []).append(entry.descriptor.num_tokens)
        assert self.forecast is not None
        return sum(self.forecast.total(mode, of_mode) for mode, of_mode in sizes.items())


def prune(
    plan: DispatchPlan,
    indices: Sequence[int],
    forecast: Forecast,
    limit: int,
    traffic: Sequence[int] = (),
) -> list[int]:
    """Graphs to give up, in order, the least saving per byte first.

    A size saves padding: without it its batches use the next larger graph of the mode; without the
    largest they use no graph, which counts as padding of the whole batch. `traffic` counts the
    batches of 0, 1, … tokens; without traffic all sizes count alike. The rest is forecast to take
    at most `limit` bytes, and is empty if nothing fits.
    """
    kept: dict[RuntimeMode, list[int]] = {}
    for graph_index in indices:
        kept.setdefault(plan.entries[graph_index].mode, []).append(graph_index)

    def size(graph_index: int) -> int:
        return plan.entries[graph_index].descriptor.num_tokens

    for of_mode in kept.values():
        of_mode.sort(key=size)
    dropped: list[int] = []
    counts = traffic if any(traffic) else [1] * (plan.largest + 1)

    def total(mode: RuntimeMode, remaining: Sequence[int]) -> int:
        return forecast.total(mode, [size(graph_index) for graph_index in remaining])

    def saving_per_byte(mode: RuntimeMode, graph_index: int) -> float:
        rest = [other for other in kept[mode] if other != graph_index]
        freed = total(mode, kept[mode]) - total(mode, rest)
        place = kept[mode].index(graph_index)
        below = size(kept[mode][place - 1]) if place else 0
        padding = size(rest[place]) - size(graph_index) if place < len(rest) else size(graph_index)
        batches = sum(counts[below + 1 : size(graph_index) + 1])
        return batches * padding / max(freed, 1)

    while sum(total(mode, of_mode) for mode, of_mode in kept.items()) > limit:
        mode, graph_index = min(
            ((mode, graph_index) for mode, of_mode in kept.items() for graph_index in of_mode),
            key=lambda pair: (saving_per_byte(*pair), -size(pair[1]), pair[1]),
        )
        kept[mode].remove(graph_index)
        dropped.append(graph_index)
    return dropped
