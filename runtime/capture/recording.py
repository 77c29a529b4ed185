"""A recording: what one capture produced for one runtime mode and descriptor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

from ...errors import RecordingReleased
from ..backends.ownership import Ownership
from ..backends.protocol import Graph


class SegmentKind(StrEnum):
    GRAPH = "graph"
    EAGER = "eager"


@dataclass(slots=True)
class Segment:
    """A graph to replay, or calls to run eagerly between two graphs.

    `copied` names eager calls whose results are copied to fixed memory at each replay; an
    out-variant of the op saves that.
    """

    kind: SegmentKind
    calls: list[Callable[[], None]]
    operations: int = 0
    copied: list[str] = field(default_factory=list)


class Recording:
    """Segments over static memory; `replay` runs them in order.

    Outputs are overwritten by the next replay or capture in the same pool. `graphs` own the pool
    memory; one without operations is kept for that alone. `ownership` holds the tensors from
    outside that they read. `bytes` is by how much the device's used memory grew.
    """

    __slots__ = (
        "bytes",
        "calls",
        "graphs",
        "name",
        "outputs",
        "ownership",
        "seconds",
        "segments",
    )

    def __init__(
        self,
        name: str,
        segments: Sequence[Segment],
        graphs: Sequence[Graph],
        ownership: Ownership,
        outputs: Any,
        *,
        seconds: float,
        bytes: int,
    ) -> None:
        self.name = name
        self.segments = tuple(segments)
        self.calls = tuple(call for segment in segments for call in segment.calls)
        self.graphs = tuple(graphs)
        self.ownership = ownership
        self.outputs = outputs
        self.seconds = seconds
        self.bytes = bytes

    @property
    def operations(self) -> int:
        return sum(segment.operations for segment in self.segments)

    def replay(self) -> None:
        for call in self.calls:
            call()

    def release(self) -> None:
        """Free the graphs and their memory; a replay raises `RecordingReleased` from now on.

        The device may still be at a replay: it ends it, and what is given the memory next, a
        capture or a replay in the same pool, comes after it on the stream.
        """
        for graph in self.graphs:
            graph.release()
        self.segments = ()
        self.graphs = ()
        self.ownership = Ownership()
        self.calls = (self._refuse,)
        self.outputs = None

    def _refuse(self) -> NoReturn:
        raise RecordingReleased(name=self.name)
