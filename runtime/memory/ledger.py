"""A ledger of device memory in which each byte has one owner, and the plan that follows from it.

Tensors share storages, and a view, an alias or a tied weight would be counted twice: what is
entered are address ranges, and a range that someone owns already is not entered again.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from ...dispatch import RuntimeMode
from ..backends.protocol import Memory


class Owner(StrEnum):
    """Who a byte belongs to; graph pools are entered per runtime mode beside these."""

    WEIGHTS = "weights"
    KV_CACHE = "KV cache"
    STATIC_BUFFERS = "static buffers"
    WORKSPACES = "workspaces"


class MemoryLedger:
    """Bytes by owner. Ranges are owned for good; the bytes of pools are stated and restated."""

    def __init__(self) -> None:
        self._owned: dict[str, list[tuple[int, int]]] = {}
        self._bytes: dict[str, int] = {}

    def own(self, owner: str, tensors: Iterable[Tensor]) -> int:
        """Enter the whole storages of `tensors` for an `Owner`, which may be given by its value.

        Returns how many bytes were nobody's before.
        """
        owner = Owner(owner)
        before = self._bytes.get(owner.value, 0)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            self.own_range(owner, str(tensor.device), start, start + storage.nbytes())
        return self._bytes.get(owner.value, 0) - before

    def own_range(self, owner: Owner, device: str, start: int, stop: int) -> None:
        """Enter the addresses from `start` to `stop` of a device, as far as they are free."""
        owned = self._owned.setdefault(device, [])
        first = bisect.bisect_left(owned, start, key=lambda taken: taken[1])
        place, fresh = start, 0
        last = first
        while last < len(owned) and owned[last][0] <= stop:
            fresh += max(0, owned[last][0] - place)
            place = max(place, owned[last][1])
            last += 1
        fresh += max(0, stop - place)
        merged = owned[first:last]
        low = min([start, *(taken[0] for taken in merged)])
        high = max([stop, *(taken[1] for taken in merged)])
        owned[first:last] = [(low, high)]
        self._bytes[owner.value] = self._bytes.get(owner.value, 0) + fresh

    def state(self, owner: str, num_bytes: int) -> None:
        """Set the bytes of something without addresses of its own, such as a graph pool."""
        self._bytes[owner] = num_bytes

    def state_pools(self, by_mode: Mapping[RuntimeMode, int]) -> None:
        """Set the bytes of the graph pool of each mode."""
        for mode, num_bytes in by_mode.items():
            self.state(f"graph pool {mode.name}", num_bytes)

    def bytes(self, owner: str) -> int:
        return self._bytes.get(owner, 0)

    def rows(self) -> list[dict[str, Any]]:
        """`{owner, bytes}` in the order in which owners were entered."""
        return [{"owner": owner, "bytes": count} for owner, count in self._bytes.items()]

    @property
    def total(self) -> int:
        return sum(self._bytes.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine may still take, in bytes, when it uses a share `utilisation` of the device.

    `kv_cache` is what is left for the KV cache beside everything else and all graphs. The KV cache
    of the same size without graphs needs only `utilisation_without_graphs`; to have graphs and
    the KV cache that fits without them takes `utilisation_with_graphs_added`, which may be above 1.
    """

    total: int
    utilisation: float
    other: int
    graphs: int
    kv_cache: int
    utilisation_without_graphs: float
    utilisation_with_graphs_added: float


def plan_memory(
    memory: Memory, ledger: MemoryLedger, graphs: int, utilisation: float
) -> MemoryPlan:
    """The plan for a device, graphs of `graphs` bytes in all, captured or still to come.

    Bytes in use that no one in the ledger owns, such as those of other processes, are not left
    for the KV cache either.
    """
    total = memory.used + memory.free
    unowned = max(0, memory.used - ledger.total)
    owners = (Owner.WEIGHTS, Owner.STATIC_BUFFERS, Owner.WORKSPACES)
    other = unowned + sum(ledger.bytes(owner.value) for owner in owners)
    return MemoryPlan(
        total=total,
        utilisation=utilisation,
        other=other,
        graphs=graphs,
        kv_cache=max(0, int(utilisation * total) - other - graphs),
        utilisation_without_graphs=utilisation - graphs / total,
        utilisation_with_graphs_added=utilisation + graphs / total,
    )
