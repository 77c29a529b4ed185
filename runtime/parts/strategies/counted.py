"""Captures, with the accounts that a strategy keeps of them."""

from __future__ import annotations

import logging

from ....dispatch import RuntimeMode
from ...capture.captures import Captures
from ...capture.session import CaptureSession
from .graph_memory import GraphMemory
from .wanted import CaptureQueue


class CountedCaptures:
    """Captures and frees graphs; updates `queue` and `memory`."""

    def __init__(self, captures: Captures, queue: CaptureQueue) -> None:
        self.captures = captures
        self.queue = queue
        self.memory = GraphMemory(captures.plan)
        self.ms: dict[RuntimeMode, dict[int, float]] = {}
        """Milliseconds that captures took, by mode and size."""
        self._refused: set[int] = set()

    def capture(self, graph_index: int, session: CaptureSession, *, serving: bool = True) -> bool:
        """See `Captures.capture`; returns whether the graph was captured."""
        captures, state = self.captures, self.queue.states[graph_index]
        captures.step = self.queue.step
        outcome = captures.capture(graph_index, session, serving=serving)
        entry = captures.plan.entries[graph_index]
        self.ms.setdefault(entry.mode, {})[entry.descriptor.num_tokens] = outcome.ms
        if outcome.record is None:
            self.queue.failed(graph_index)
            captures.failed(graph_index, outcome, None if state.dropped else state.retry_at)
            return False
        self.queue.changed()
        state.captured, state.bytes, state.launches = True, outcome.bytes, outcome.operations
        self.memory.took(graph_index, outcome.bytes)
        self._refused.discard(graph_index)
        return True

    def evict(self, graph_index: int) -> None:
        """Free a captured graph."""
        self.captures.step = self.queue.step
        self.memory.freed(graph_index, self.captures.evict(graph_index))
        state = self.queue.states[graph_index]
        state.captured, state.bytes = False, 0
        self.queue.changed()

    def refused(self, graph_index: int, reason: str) -> None:
        """State once why a graph is not captured, and again after it was."""
        if graph_index not in self._refused:
            self._refused.add(graph_index)
            self.captures.step = self.queue.step
            facts = self.captures.facts(graph_index)
            self.captures.records.events.emit(
                "capture.refused", level=logging.INFO, **facts, reason=reason
            )

    def estimate(self, graph_index: int) -> float:
        """Milliseconds that a capture is expected to take; 0 without a measured one of its mode.

        Those of the nearest size, the larger of two. Capturing is host work, one launch after
        another: sizes differ little, modes much.
        """
        entry = self.captures.plan.entries[graph_index]
        by_size, size = self.ms.get(entry.mode, {}), entry.descriptor.num_tokens
        nearest = min(by_size, key=lambda n: (abs(n - size), -n), default=None)
        return 0.0 if nearest is None else by_size[nearest]

    def release_pool(self) -> None:
        """Give back the memory of the pool, which has no graph any more."""
        self.captures.release_pool()
        self.memory.pool_freed()
