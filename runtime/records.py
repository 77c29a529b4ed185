"""What a prepared model did, as typed data: read by reports and metrics.

Each record is also emitted as an event, which is output only.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar, cast

from ..compile.ir.compilation import CompileRecords
from ..events import Events, Span

KEPT = 4096
"""Records kept of each kind; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class Record:
    """A fact, with the name and the log level of its event."""

    event: ClassVar[str]
    level: ClassVar[int] = logging.DEBUG

    def facts(self) -> dict[str, Any]:
        """JSON-able, as the report and the event state it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class GraphRecord(Record):
    """Something that happened to one graph, after `step` batches (0: at startup)."""

    mode: str
    num_tokens: int
    graph_index: int
    step: int


@dataclass(frozen=True, slots=True)
class CaptureRecord(GraphRecord):
    """A graph was captured."""

    event = "capture"
    ms: float
    bytes: int
    allocated: int
    """The part of torch's allocator."""
    segments: int
    descriptor: Mapping[str, Any]
    topologies: list[str]
    """Of its graphs, see `backends.protocol.Graph`."""


@dataclass(frozen=True, slots=True)
class BucketHole(Record):
    """Legal steps without a bucket: the smallest, and the largest of each dimension."""

    event = "buckets.hole"
    level = logging.INFO
    phase: str
    first: tuple[int, ...]
    last: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketsMissing(Record):
    """Buckets that would close all holes of a phase."""

    event = "buckets.missing"
    level = logging.INFO
    phase: str
    buckets: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CaptureFailure(GraphRecord):
    """A capture failed; it is tried again at `retry_at_step`, or never."""

    event = "capture.failed"
    level = logging.WARNING
    reason: str
    retry_at_step: int | None


@dataclass(frozen=True, slots=True)
class CaptureRefusal(GraphRecord):
    """A graph was not captured for lack of memory or of time."""

    event = "capture.refused"
    level = logging.INFO
    reason: str


@dataclass(frozen=True, slots=True)
class Eviction(GraphRecord):
    """A graph was freed."""

    event = "capture.evicted"
    freed: int


@dataclass(frozen=True, slots=True)
class UnknownStepMemory(Record):
    """The largest step could not be run, so that a memory plan leaves no room for it."""

    event = "memory.unknown_step"
    level = logging.WARNING
    reason: str


@dataclass(frozen=True, slots=True)
class PlannedMemory(Record):
    """Forecast bytes of the graphs that are kept, and the plan entries that are dropped.

    `margin` is the number of bytes by which the forecast may be wrong, judged by test probes.
    """

    event = "memory.forecast"
    level = logging.INFO
    limit: int | None
    bytes: int
    margin: int
    dropped: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class UncertainForecast(Record):
    """The fit is bad: the forecast may be wrong by more than a tenth."""

    event = "memory.uncertain"
    level = logging.WARNING
    bytes: int
    margin: int


@dataclass(frozen=True, slots=True)
class ForecastAccuracy(Record):
    """What the graphs captured at startup were forecast to take, and what they took, in bytes."""

    event = "memory.accuracy"
    level = logging.INFO
    forecast: int
    actual: int
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class MemoryUse(Record):
    """After `capture`: bytes the recordings took; bytes that this process uses, and free bytes."""

    event = "memory"
    recordings: int
    used: int
    free: int


@dataclass(frozen=True, slots=True)
class UnwatchedTensors(Record):
    """A FULL graph reads these tensors, and no step checks their addresses: `watch` them."""

    event = "capture.unwatched"
    level = logging.WARNING
    recording: str
    tensors: list[str]


@dataclass(frozen=True, slots=True)
class HostValues(Record):
    """A graph has the values that these tensors on the host had at its capture. A step after one of
    them was changed in place raises HostValueChanged."""

    event = "capture.host_values"
    level = logging.WARNING
    recording: str
    tensors: list[str]


@dataclass(frozen=True, slots=True)
class RowsMixed(Record):
    """Padding of `size` would change real rows of a piece's result, so no batch is padded."""

    event = "rows_mixed"
    level = logging.WARNING
    piece: int
    result: str
    where: str | None
    size: str


@dataclass(frozen=True, slots=True)
class BackgroundPhase(Record):
    """What the thread that compiles is doing, `seconds` after the start."""

    event = "background"
    level = logging.INFO
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class BackgroundFailure(Record):
    """The model could not be compiled and stays uncompiled."""

    event = "background.failed"
    level = logging.WARNING
    reason: str


@dataclass(frozen=True, slots=True)
class Verified(Record):
    """The bundle of this start is that of the model: it was traced again and compared, or was
    before: an equal process has verified or made it on this machine."""

    event = "bundle.verified"
    level = logging.INFO
    seconds: float
    before: bool = False


@dataclass(frozen=True, slots=True)
class Stale(Record):
    """The bundle of this start is of another program: `difference` is the first one."""

    event = "bundle.stale"
    level = logging.ERROR
    seconds: float
    difference: str


@dataclass(frozen=True, slots=True)
class NotVerified(Record):
    """Whether the bundle is that of the model is not known."""

    event = "bundle.not_verified"
    level = logging.WARNING
    reason: str


@dataclass(frozen=True, slots=True)
class BundleFailed(Record):
    """A piece of a bundle raised when it ran; the second failure puts the bundle aside."""

    event = "bundle.failed"
    level = logging.ERROR
    digest: str
    reason: str
    put_aside: bool


@dataclass(frozen=True, slots=True)
class Switched(Record):
    """Compiled code serves: `steps` ran uncompiled, and the switch took `ms` between two."""

    event = "background.switched"
    level = logging.INFO
    seconds: float
    steps: int
    ms: float


@dataclass(frozen=True, slots=True)
class WarmupStep(Record):
    """Item `n` `of` warm-up is done."""

    event = "warmup"
    n: int
    of: int
    kind: str
    shape: str
    ms: float
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class SkippedWarmup(Record):
    """A kind of warm-up was left out."""

    event = "warmup.skipped"
    level = logging.WARNING
    kind: str
    shapes: list[str]
    cost: str


@dataclass(frozen=True, slots=True)
class AfterSealWork(Record):
    """Something compiled or was captured after `seal()`, outside the strategy."""

    event = "after_seal"
    level = logging.WARNING
    kind: str
    detail: str
    shape: str
    stack: list[str]


@dataclass(frozen=True, slots=True)
class ShadowStopped(Record):
    """No further step is proved: `reason` is a `shadow.Stopped`."""

    event = "shadow.stopped"
    level = logging.WARNING
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class WrongStep(Record):
    """A step was other than the uncompiled model's. `out_of_service` is a `shadow.Cause`.

    `difference` and `tolerance` are relative to the largest element of the row, in units of its
    dtype's precision. `file` has the step.
    """

    event = "shadow.wrong"
    level = logging.ERROR
    mode: str
    num_tokens: int
    padded: int
    graph_index: int
    difference: float
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
