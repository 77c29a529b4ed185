"""Which capture sizes to give up so that a plan keeps a memory limit: those that save least.

A size saves padding: without it its batches go to the next larger graph of the mode, or, at the
top, to no graph at all, which counts as padding of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...dispatch import DispatchPlan, RuntimeMode
from .forecast import Forecast


def prune(
    plan: DispatchPlan,
    indices: Sequence[int],
    forecast: Forecast,
    limit: int,
    traffic: Sequence[int] = (),
) -> list[int]:
    """Graphs to leave out, in the order in which they were given up, the least saving per byte.

    `traffic` counts the batches of 0, 1, … tokens; as long as there are none all sizes are alike.
    What remains is forecast to take at most `limit` bytes; if nothing can, nothing remains.
    """
    kept: dict[RuntimeMode, list[int]] = {}
    for graph_index in indices:
        kept.setdefault(plan.entries[graph_index].mode, []).append(graph_index)
    for of_mode in kept.values():
        of_mode.sort(key=lambda graph_index: plan.entries[graph_index].descriptor.num_tokens)
    dropped: list[int] = []
    counts = traffic if any(traffic) else [1] * (plan.largest + 1)

    def size(graph_index: int) -> int:
        return plan.entries[graph_index].descriptor.num_tokens

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
