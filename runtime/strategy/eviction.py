"""Which lazy recordings give way when their bytes are bounded: the least value first.

A recording is worth the time it saves per byte: how often its size was wanted of late, times the
launches that one replay saves the host, over the bytes it took. Evicting from a shared pool is
safe, since no recording reads what another one leaves in the pool; but the pool shrinks by less
than the recording took when it was captured, so what comes back is measured, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...dispatch import PlanEntry
from .queue import GraphState


def worth(hits: int, launches: int, num_bytes: int) -> float:
    """Launches saved per byte; what takes no memory is worth keeping whatever it saves."""
    return math.inf if num_bytes <= 0 else hits * launches / num_bytes


def lazy_bytes(states: Sequence[GraphState]) -> int:
    """Bytes of the recordings that were not captured at startup."""
    return sum(state.bytes for state in states if state.on_use)


def make_room(
    states: Sequence[GraphState],
    entries: Sequence[PlanEntry],
    graph_index: int,
    expected: int,
    limit: int,
    evict: Callable[[int], None],
) -> bool:
    """Evict until a recording of `graph_index` that takes `expected` bytes keeps `limit`.

    Only what is worth less than the newcomer goes. Returns whether there is room.
    """
    if expected > limit:
        return False
    value = worth(states[graph_index].hits, _launches(states, entries, graph_index), expected)
    while lazy_bytes(states) + expected > limit:
        victim = _least_worth(states)
        if victim is None or _worth_of(states[victim]) >= value:
            return False
        evict(victim)
    return True


def trim(states: Sequence[GraphState], limit: int, evict: Callable[[int], None]) -> None:
    """Evict until lazy recordings keep `limit`, after one took more than was expected."""
    while lazy_bytes(states) > limit:
        victim = _least_worth(states)
        assert victim is not None
        evict(victim)


def _worth_of(state: GraphState) -> float:
    return worth(state.hits, state.launches, state.bytes)


def _least_worth(states: Sequence[GraphState]) -> int | None:
    lazy = [graph_index for graph_index, state in enumerate(states) if state.on_use]
    return min(
        lazy, key=lambda graph_index: (_worth_of(states[graph_index]), graph_index), default=None
    )


def _launches(states: Sequence[GraphState], entries: Sequence[PlanEntry], graph_index: int) -> int:
    """Launches do not depend on the size: those of any recording of the mode."""
    mode = entries[graph_index].mode
    return max(
        (
            state.launches
            for state, entry in zip(states, entries, strict=True)
            if entry.mode is mode
        ),
        default=1,
    )
