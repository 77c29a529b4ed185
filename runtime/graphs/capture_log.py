"""What happened to the graphs of a plan, as records."""

from __future__ import annotations

from ...dispatch import Dispatcher
from ..records import CaptureFailure, CaptureRecord, CaptureRefusal, Eviction, Records
from .recording import Recording
from .wanted import CaptureQueue


class CaptureLog:
    """Records captures, failures, refusals and evictions, each with its graph and step."""

    def __init__(self, records: Records, dispatcher: Dispatcher, queue: CaptureQueue) -> None:
        self._records = records
        self._dispatcher = dispatcher
        self._queue = queue
        self._refused: set[int] = set()

    def captured(self, graph_index: int, ms: float, num_bytes: int, recording: Recording) -> None:
        """`ms` and `num_bytes` are the most of all ranks."""
        self._refused.discard(graph_index)
        descriptor = self._dispatcher.plan.entries[graph_index].descriptor.as_json()
        where, segments = self._where(graph_index), len(recording.segments)
        self._records.add(CaptureRecord(*where, ms, num_bytes, segments, descriptor))

    def failed(self, graph_index: int, reason: str) -> None:
        state = self._queue.states[graph_index]
        retry_at = None if state.dropped else state.retry_at
        self._records.add(CaptureFailure(*self._where(graph_index), reason, retry_at))

    def refused(self, graph_index: int, reason: str) -> None:
        """Once per graph, and again after it was captured."""
        if graph_index not in self._refused:
            self._refused.add(graph_index)
            self._records.add(CaptureRefusal(*self._where(graph_index), reason))

    def evicted(self, graph_index: int, freed: int) -> None:
        self._records.add(Eviction(*self._where(graph_index), freed))

    def _where(self, graph_index: int) -> tuple[str, int, int, int]:
        """The first fields of a GraphRecord."""
        entry = self._dispatcher.plan.entries[graph_index]
        return entry.mode.name, entry.descriptor.num_tokens, graph_index, self._queue.step
