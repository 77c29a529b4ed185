"""What a prepared model did, as typed data: read by reports and metrics.

Each record is also emitted as an event, which is output only.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

from ...compile.ir.compilation import CompileRecords
from ...events import Events, Span

KEPT = 4096
"""Records kept of each kind; the oldest are dropped first."""


@dataclass_transform(frozen_default=True)
class Record:
    """A fact, with the name and the log level of its event. Its classes are frozen dataclasses."""

    event: ClassVar[str]
    level: ClassVar[int]

    def __init_subclass__(cls, *, event: str = "", level: int = logging.DEBUG) -> None:
        cls.event, cls.level = event, level
        dataclass(frozen=True)(cls)

    def facts(self) -> dict[str, Any]:
        """JSON-able, as the report and the event state it."""
        return asdict(cast(Any, self))


class GraphRecord(Record):
    """Something that happened to one graph, after `step` batches (0: at startup)."""

    mode: str
    num_tokens: int
    graph_index: int
    step: int


class CaptureRecord(GraphRecord, event="capture"):
    """A graph was captured."""

    ms: float
    bytes: int
    allocated: int
    """The part of torch's allocator."""
    segments: int
    topologies: list[str]
    """Of the graphs that are replayed: equal if one executable can become the other."""
    descriptor: Mapping[str, Any]


class BucketHole(Record, event="buckets.hole", level=logging.INFO):
    """Legal steps without a bucket: the smallest, and the largest of each dimension."""

    phase: str
    first: tuple[int, ...]
    last: tuple[int, ...]


class BucketsMissing(Record, event="buckets.missing", level=logging.INFO):
    """Buckets that would close all holes of a phase."""

    phase: str
    buckets: list[tuple[int, ...]]


class CaptureFailure(GraphRecord, event="capture.failed", level=logging.WARNING):
    """A capture failed; it is tried again at `retry_at_step`, or never."""

    reason: str
    retry_at_step: int | None


class ForecastAccuracy(Record, event="memory.accuracy", level=logging.INFO):
    """What the graphs captured at startup were forecast to take, and what they took, in bytes."""

    forecast: int
    actual: int
    accuracy: float | None


class MemoryUse(Record, event="memory"):
    """After `capture`: bytes the recordings took; bytes that this process uses, and free bytes."""

    recordings: int
    used: int
    free: int


class UnwatchedTensors(Record, event="capture.unwatched", level=logging.WARNING):
    """A FULL graph reads these tensors, and no step checks their addresses: `watch` them."""

    recording: str
    tensors: list[str]


class HostValues(Record, event="capture.host_values", level=logging.WARNING):
    """A graph has the values that these tensors on the host had at its capture. A step after one of
    them was changed in place raises HostValueChanged."""

    recording: str
    tensors: list[str]


class RowsMixed(Record, event="rows_mixed", level=logging.WARNING):
    """Padding of `size` would change real rows of a piece's result, so no batch is padded."""

    piece: int
    result: str
    where: str | None
    size: str


class RegionCompiled(Record, event="region.compiled", level=logging.INFO):
    """A function that the model compiles itself was traced for a dummy batch; unless `generated`,
    its code was stored."""

    function: str
    where: str
    seconds: float
    generated: bool


class BackgroundPhase(Record, event="background", level=logging.INFO):
    """What the thread that compiles is doing, `seconds` after the start."""

    phase: str
    seconds: float


class BackgroundFailure(Record, event="background.failed", level=logging.WARNING):
    """The model could not be compiled and stays uncompiled."""

    reason: str


class Verified(Record, event="bundle.verified", level=logging.INFO):
    """The bundle of this start is that of the model: it was traced again and compared."""

    seconds: float


class Stale(Record, event="bundle.stale", level=logging.ERROR):
    """The bundle of this start is of another program: `difference` is the first one."""

    seconds: float
    difference: str


class NotVerified(Record, event="bundle.not_verified", level=logging.WARNING):
    """Whether the bundle is that of the model is not known."""

    reason: str


class BundleFailed(Record, event="bundle.failed", level=logging.ERROR):
    """A piece of a bundle raised when it ran; the second failure puts the bundle aside."""

    digest: str
    reason: str
    put_aside: bool


class Switched(Record, event="background.switched", level=logging.INFO):
    """Compiled code serves: `steps` ran uncompiled, and the switch took `ms` between two."""

    seconds: float
    steps: int
    ms: float


class LibrariesBuilt(Record, event="background.libraries", level=logging.INFO):
    """The next start has libraries, or `reason` says why not."""

    seconds: float
    reason: str | None


class WarmupStep(Record, event="warmup"):
    """Item `n` `of` warm-up is done."""

    n: int
    of: int
    kind: str
    shape: str
    ms: float
    free_bytes: int | None


class SkippedWarmup(Record, event="warmup.skipped", level=logging.WARNING):
    """A kind of warm-up was left out."""

    kind: str
    shapes: list[str]
    cost: str


class ShadowStopped(Record, event="shadow.stopped", level=logging.WARNING):
    """No further step is proved: `reason` is a `shadow.Stopped`."""

    reason: str
    detail: str


class WrongStep(Record, event="shadow.wrong", level=logging.ERROR):
    """A step was other than the uncompiled model's. `out_of_service` is a `shadow.Cause`.

    `difference` and `tolerance` are relative to the largest element of the row, in units of its
    dtype's precision; `difference` is None for what has no distance: another shape, a NaN, memory
    that only one wrote. `file` has the step.
    """

    mode: str
    num_tokens: int
    padded: int
    graph_index: int
    difference: float | None
    tolerance: float
    out_of_service: str
    graphs: list[str]
    file: str | None


R = TypeVar("R", bound=Record)


class Records:
    """What one prepared model did. `settings` are the resolved ones, `compile` is compilation's."""

    def __init__(self, events: Events | None = None) -> None:
        """The records are of this model alone; its events are passed on to `events`, if given."""
        self.events = Events(parent=events)
        self.compile = CompileRecords()
        self.settings: dict[str, Any] = {}
        self.code_failed: Callable[[Exception], object] = lambda error: None
        """Called with what a capture raised: code of the model may have."""
        self._kept: dict[type[Record], deque[Record]] = {}

    def add(self, record: Record) -> None:
        """Keep a record and emit its event."""
        self._kept.setdefault(type(record), deque(maxlen=KEPT)).append(record)
        self.events.emit(record.event, level=record.level, **record.facts())

    def of(self, kind: type[R]) -> list[R]:
        """The records of one kind, oldest first, such as `records.of(CaptureRecord)`."""
        return cast(list[R], list(self._kept.get(kind, ())))

    @property
    def counters(self) -> Counter[str]:
        """Counters of this model: `dynamo_traces`, `cache.hit`, …"""
        return self.events.counters

    @property
    def phases(self) -> list[Span]:
        """Phases of the startup in order, without `prepare` as a whole; a name can repeat."""
        return [span for span in self.events.phases if span.name != "prepare"]

    @property
    def prepare_seconds(self) -> float:
        """Seconds that `prepare` took; 0 for a model that was not made by `prepare`."""
        return sum(span.seconds for span in self.events.phases if span.name == "prepare")
