"""The bytes that graphs may take, and those they have taken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...dispatch import DispatchPlan, Histogram, RuntimeMode
from ...events import Events
from ..backends.protocol import GraphBackend, Memory
from ..records import PlannedMemory, Records
from .forecast import Forecast, RecordGraph, forecast_memory
from .pruning import prune

Exchange = Callable[[str, Mapping[str, Any]], list[dict[str, Any]]]
"""Tells all ranks some facts and returns those of each; alone, just one's own."""


def limit_in_bytes(limit: int | float | None, memory: Memory) -> int | None:
    """An operator's limit: a whole number is bytes, a float is a fraction of free memory."""
    return int(limit * memory.free) if isinstance(limit, float) else limit


class GraphMemory:
    """`used` is what captures took less what was seen to come back.

    It is kept here and not read from the device, where the engine allocates at the same time.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.forecast: Forecast | None = None
        self.impossible: set[int] = set()
        """Graphs whose probe failed, and those of modes in which none could be probed."""
        self.by_mode: dict[RuntimeMode, int] = {}

    @property
    def used(self) -> int:
        return sum(self.by_mode.values())

    def took(self, mode: RuntimeMode, num_bytes: int) -> None:
        self.by_mode[mode] = self.by_mode.get(mode, 0) + num_bytes

    def growth(self, mode: RuntimeMode, num_tokens: int) -> int:
        """Expected bytes of one more graph; 0 where nothing was probed."""
        if self.forecast is None or mode not in self.forecast.modes:
            return 0
        first = mode not in self.by_mode
        return self.forecast.growth(mode, num_tokens, first=first, used=self.used)

    def admits(self, mode: RuntimeMode, num_tokens: int) -> bool:
        """Whether one more graph is expected to keep the limit."""
        return self.limit is None or self.used + self.growth(mode, num_tokens) <= self.limit

    def probe(
        self,
        plan: DispatchPlan,
        backend: GraphBackend,
        record: RecordGraph,
        exchange: Exchange,
        events: Events,
    ) -> None:
        """Forecast what the graphs of `plan` take; ranks go by the greatest of their forecasts."""
        indices = range(len(plan.entries))
        forecast, failed = forecast_memory(backend, plan, indices, record, events)
        answers = exchange("forecast", {"forecast": forecast.as_json(), "failed": failed})
        self.forecast = Forecast.worst([answer["forecast"] for answer in answers])
        self.impossible = {graph_index for answer in answers for graph_index in answer["failed"]}
        self.impossible |= {s for s in indices if plan.entries[s].mode not in self.forecast.modes}

    def keep(
        self,
        limit: int | None,
        plan: DispatchPlan,
        histogram: Histogram | None,
        exchange: Exchange,
        records: Records,
    ) -> Collection[int]:
        """Graphs to drop by the forecast, so that the rest can be captured and keeps `limit`.

        `histogram` tells which sizes occur, if it is known. Ranks go by the least limit and the
        traffic of them all.
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
            possible = [
                graph_index for graph_index in indices if graph_index not in self.impossible
            ]
            pruned = prune(plan, possible, self.forecast, self.limit, traffic)
        dropped = self.impossible.union(pruned)
        kept = [graph_index for graph_index in indices if graph_index not in dropped]
        lost = [plan.entries[i].as_json() for i in (*sorted(self.impossible), *pruned)]
        records.add(PlannedMemory(self.limit, self.forecast_of(plan, kept), lost))
        return dropped

    def forecast_of(self, plan: DispatchPlan, indices: Collection[int]) -> int:
        """Forecast bytes of just `indices`."""
        sizes: dict[RuntimeMode, list[int]] = {}
        for graph_index in indices:
            entry = plan.entries[graph_index]
            sizes.setdefault(entry.mode, []).append(entry.descriptor.num_tokens)
        assert self.forecast is not None
        return sum(self.forecast.total(mode, of_mode) for mode, of_mode in sizes.items())
