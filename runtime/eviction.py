"""Which lazy recordings give way when their bytes are bounded: the least value first.

A recording is worth the time it saves per byte: how often its size was wanted of late, times the
launches that one replay saves the host, over the bytes it took. Evicting from a shared pool is
safe, since no recording reads what another one leaves in the pool; but the pool shrinks by less
than the recording took when it was captured, so what comes back is measured, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..dispatch import PlanEntry
from .strategies import SlotState


def worth(hits: int, launches: int, num_bytes: int) -> float:
    """Launches saved per byte; what takes no memory is worth keeping whatever it saves."""
    return math.inf if num_bytes <= 0 else hits * launches / num_bytes


def lazy_bytes(slots: Sequence[SlotState]) -> int:
    """Bytes of the recordings that were not captured at startup."""
    return sum(state.bytes for state in slots if state.on_use)


def make_room(
    slots: Sequence[SlotState],
    entries: Sequence[PlanEntry],
    slot: int,
    expected: int,
    limit: int,
    evict: Callable[[int], None],
) -> bool:
    """Evict until a recording of `slot` that takes `expected` bytes keeps `limit`.

    Only what is worth less than the newcomer goes. Returns whether there is room.
    """
    if expected > limit:
        return False
    value = worth(slots[slot].hits, _launches(slots, entries, slot), expected)
    while lazy_bytes(slots) + expected > limit:
        victim = _least_worth(slots)
        if victim is None or _worth_of(slots[victim]) >= value:
            return False
        evict(victim)
    return True


def trim(slots: Sequence[SlotState], limit: int, evict: Callable[[int], None]) -> None:
    """Evict until lazy recordings keep `limit`, after one took more than was expected."""
    while lazy_bytes(slots) > limit:
        victim = _least_worth(slots)
        assert victim is not None
        evict(victim)


def _worth_of(state: SlotState) -> float:
    return worth(state.hits, state.launches, state.bytes)


def _least_worth(slots: Sequence[SlotState]) -> int | None:
    lazy = [slot for slot, state in enumerate(slots) if state.on_use]
    return min(lazy, key=lambda slot: (_worth_of(slots[slot]), slot), default=None)


def _launches(slots: Sequence[SlotState], entries: Sequence[PlanEntry], slot: int) -> int:
    """Launches do not depend on the size: those of any recording of the mode."""
    mode = entries[slot].mode
    return max(
        (state.launches for state, entry in zip(slots, entries, strict=True) if entry.mode is mode),
        default=1,
    )
