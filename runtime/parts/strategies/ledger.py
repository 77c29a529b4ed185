"""A ledger of device memory in which each byte has one owner, and the memory plan made from it.

The ledger holds address ranges, so views, aliases and tied weights are counted once: a range that
has an owner is not entered again.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from ....dispatch import RuntimeMode
from ....torch_compat.basics.tensors import inner_tensors
from ...backends.protocol import Memory
from ...core.code import ModelCode


class Owner(StrEnum):
    """Who a byte belongs to; graph pools are entered per runtime mode beside these."""

    WEIGHTS = "weights"
    KV_CACHE = "KV cache"
    STATIC_BUFFERS = "static buffers"
    WORKSPACES = "workspaces"


class MemoryLedger:
    """Bytes by owner. A range keeps its first owner; the bytes of pools are set again and again."""

    def __init__(self) -> None:
        self._owned: dict[str, list[tuple[int, int]]] = {}
        self._bytes: dict[str, int] = {}

    def own(self, owner: str, tensors: Iterable[Tensor]) -> int:
        """Enter the whole storages of `tensors` for an `Owner` or its value.

        Returns how many of the bytes had no owner before.
        """
        owner = Owner(owner)
        before = self._bytes.get(owner.value, 0)
        storages = {
            (str(tensor.device), (storage := tensor.untyped_storage()).data_ptr(), storage.nbytes())
            for each in tensors
            for tensor in inner_tensors(each)
        }
        for device, start, size in sorted(storages):
            self.own_range(owner, device, start, start + size)
        return self._bytes.get(owner.value, 0) - before

    def own_range(self, owner: Owner, device: str, start: int, stop: int) -> None:
        """Enter those addresses from `start` to `stop` of a device that have no owner yet."""
        owned = self._owned.setdefault(device, [])
        first = bisect.bisect_left(owned, (start,))
        if first and owned[first - 1][1] >= start:
            first -= 1
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
        """Set the bytes of something that has no addresses, such as a graph pool."""
        self._bytes[owner] = num_bytes

    def state_pools(self, by_mode: Mapping[RuntimeMode, int]) -> None:
        """Set the bytes of the graph pool of each mode."""
        for mode, num_bytes in by_mode.items():
            self.state(f"graph pool {mode.name}", num_bytes)

    def bytes(self, owner: str) -> int:
        return self._bytes.get(owner, 0)

    def rows(self) -> list[dict[str, Any]]:
        """`{owner, bytes}` in the order of the first entry."""
        return [{"owner": owner, "bytes": count} for owner, count in self._bytes.items()]

    @property
    def total(self) -> int:
        return sum(self._bytes.values())


def opening_ledger(codes: Sequence[ModelCode]) -> MemoryLedger:
    """Weights and static buffers; the engine enters its KV cache and workspaces."""
    ledger, compiled = MemoryLedger(), codes[0].compiled
    if compiled.traced:
        ledger.own(Owner.WEIGHTS, compiled.weights.values())
    else:  # it can read every weight of the model
        ledger.own(Owner.WEIGHTS, [*compiled.model.parameters(), *compiled.model.buffers()])
    for code in codes:
        ledger.own(Owner.STATIC_BUFFERS, code.inputs.at(code.inputs.limits).views)
    return ledger


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes an engine may use if it uses the fraction `utilization` of the device.

    `kv_cache` is what is left beside everything else and all graphs. `graphs` is a forecast until
    all are captured; `margin` bytes, by which test probes say it may be wrong, are left free, and
    `largest_step`, which the largest step takes while it runs without a graph: so do the runs
    before captures. A margin above a tenth of `graphs` means that the fit is bad, which is logged.
    """

    total: int
    utilization: float
    other: int
    graphs: int
    kv_cache: int
    margin: int = 0
    largest_step: int = 0


def plan_memory(
    memory: Memory,
    ledger: MemoryLedger,
    graphs: int,
    utilization: float,
    margin: int = 0,
    largest_step: int = 0,
) -> MemoryPlan:
    """The plan for a device and `graphs` bytes of graphs, captured or still to be captured.

    Bytes in use without an owner in the ledger, such as those of other processes, count as used.
    """
    total = memory.total
    unowned = max(0, memory.taken - ledger.total)
    owners = (Owner.WEIGHTS, Owner.STATIC_BUFFERS, Owner.WORKSPACES)
    other = unowned + sum(ledger.bytes(owner.value) for owner in owners)
    return MemoryPlan(
        total=total,
        utilization=utilization,
        other=other,
        graphs=graphs,
        kv_cache=max(0, int(utilization * total) - other - graphs - margin - largest_step),
        margin=margin,
        largest_step=largest_step,
    )
