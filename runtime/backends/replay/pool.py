"""The bytes a shared graph pool would take on a device, for tests of memory policy."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet


class ModelledPool:
    """High-water mark of what captures held at once, plus a fixed charge for each graph.

    Captures add up until `settle` says that their tensors are no longer held; later captures then
    use the same bytes again.
    """

    def __init__(self, graph_bytes: int) -> None:
        self._graph_bytes = graph_bytes
        self._graphs: WeakSet[Any] = WeakSet()
        self._held = 0
        self._peak = 0

    @property
    def bytes(self) -> int:
        """As with a device's pool, all of it goes back when the last graph is gone."""
        return self._peak + self._graph_bytes * len(self._graphs) if self._graphs else 0

    def growth(self, made: int) -> int:
        """By how much `bytes` would grow with one more capture that makes `made` bytes."""
        return max(0, self._held + made - self._peak) + self._graph_bytes

    def add(self, graph: Any, made: int) -> None:
        """`graph` was captured and made tensors of `made` bytes."""
        if not self._graphs:
            self._held = self._peak = 0
        self._graphs.add(graph)
        self._held += made
        self._peak = max(self._peak, self._held)

    def settle(self) -> None:
        self._held = 0

    def remove(self, graph: Any) -> None:
        self._graphs.discard(graph)
