"""What a prepared model did, as typed data: read by reports and metrics.

Each kind of record states its event, its key in the report and its metrics, so that a new fact is
a new class here. Kinds are reported in the order of their classes. Each record is also emitted as
an event, which is output only.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform

from ...compile.ir.compilation import CompileRecords
from ...events import Events

KEPT = 4096
"""Records kept of each kind; the oldest are dropped first."""


@dataclass(frozen=True)
class Metric:
    """A counter for Prometheus: the records of a kind, by the fields `labels`.

    With `amount` it adds up these amounts. With `first` it is a gauge: the amount of the first
    record, absent without one.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    amount: Callable[[Any], float] = lambda record: 1
    first: bool = False

    def samples(self, records: Sequence[Record]) -> dict[tuple[str, ...], float]:
        """Values by those of the labels; without labels a counter begins with 0."""
        sums: dict[tuple[str, ...], float] = {} if self.labels or self.first else {(): 0}
        for record in records[:1] if self.first else records:
            labels = tuple(getattr(record, label) for label in self.labels)
            sums[labels] = sums.get(labels, 0) + self.amount(record)
        return sums


@dataclass_transform(frozen_default=True)
class Record:
    """A fact, with the name and the log level of its event. Its classes are frozen dataclasses."""

    event: ClassVar[str]
    level: ClassVar[int]
    report: ClassVar[str]
    """The key of these records in the report, such as `buckets.holes`; empty without one."""
    metrics: ClassVar[tuple[Metric, ...]] = ()

    def __init_subclass__(
        cls, *, event: str = "", level: int = logging.DEBUG, report: str = ""
    ) -> None:
        cls.event, cls.level, cls.report = event, level, report
        dataclass(frozen=True)(cls)

    def facts(self) -> dict[str, Any]:
        """JSON-able, as the report and the event state it."""
        return asdict(cast(Any, self))

    @classmethod
    def reported(cls, records: list[Self]) -> dict[str, Any]:
        """What the report states of all records of this kind, by key."""
        return {cls.report: [record.facts() for record in records]} if cls.report else {}


def record_kinds(base: type[Record] = Record) -> Iterator[type[Record]]:
    """The kinds of records below `base`, in the order of their classes."""
    for kind in base.__subclasses__():
        yield kind
        yield from record_kinds(kind)


class BucketHole(Record, event="buckets.hole", level=logging.INFO, report="buckets.holes"):
    """Legal steps without a bucket: the smallest, and the largest of each dimension."""

    phase: str
    first: tuple[int, ...]
    last: tuple[int, ...]


class BucketsMissing(Record, event="buckets.missing", level=logging.INFO, report="buckets.missing"):
    """Buckets that would close all holes of a phase."""

    phase: str
    buckets: list[tuple[int, ...]]


class GraphRecord(Record):
    """Something that happened to one graph, after `step` batches (0: at startup)."""

    mode: str
    num_tokens: int
    graph_index: int
    step: int


class CaptureRecord(GraphRecord, event="capture", report="captures"):
    """A graph was captured."""

    metrics = (
        Metric("piecegraph_captures", "Graphs captured.", ("mode",)),
        Metric(
            "piecegraph_capture_seconds",
            "Seconds spent capturing.",
            ("mode",),
            lambda capture: capture.ms / 1000,
        ),
    )
    ms: float
    bytes: int
    allocated: int
    """The part of torch's allocator."""
    segments: int
    descriptor: Mapping[str, Any]


class CaptureFailure(GraphRecord, event="capture.failed", level=logging.WARNING):
    """A capture failed; it is tried again at `retry_at_step`, or never."""

    reason: str
    retry_at_step: int | None


class RegionCompiled(Record, event="region.compiled", level=logging.INFO, report="regions"):
    """A function that the model compiles itself was traced for a dummy batch; unless `generated`,
    its code was stored."""

    function: str
    where: str
    seconds: float
    generated: bool


class OpaqueOp(Record, event="opaque_op", level=logging.WARNING, report="opaque_ops"):
    """Compiled pieces call an operator whose kernel is Python for every device, at `where`, that
    often in a step: it was not decomposed, and nothing is fused with it."""

    op: str
    calls: int
    where: str


class WorkSeen(Record, event="after_seal", level=logging.WARNING, report="after_seal"):
    """Something was traced, compiled or captured after `seal()`, outside the strategy: in a step of
    `shape`, called from `stack`, the innermost line last."""

    kind: str
    detail: str
    shape: str
    stack: list[str]


class RowsMixed(Record, event="rows_mixed", level=logging.WARNING, report="rows_mixed"):
    """Padding of `size` would change real rows of a piece's result, or state: no batch is padded,
    or none of up to `end` tokens beyond `end`. Without a piece it is a choice or a number."""

    piece: int | None
    result: str
    where: str | None
    size: str
    end: int | None = None


class UnwatchedTensors(
    Record, event="capture.unwatched", level=logging.WARNING, report="unwatched"
):
    """A FULL graph reads these tensors, and no step checks their addresses: `watch` them."""

    recording: str
    tensors: list[str]


class HostValues(Record, event="capture.host_values", level=logging.WARNING, report="host_values"):
    """A graph has the values that these tensors on the host had at its capture. A step after one of
    them was changed in place raises HostValueChanged."""

    recording: str
    tensors: list[str]


class GraphsReturned(Record, event="capture.returned", level=logging.INFO, report="returns"):
    """The graphs that `release(keep="plan")` freed are back: after `seconds`, at batch `step`."""

    graphs: int
    seconds: float
    step: int


class MemoryUse(Record, event="memory"):
    """After `capture`: bytes the recordings took; bytes that this process uses, and free bytes."""

    recordings: int
    used: int
    free: int


class StartupRecord(Record):
    """Something that the startup did after `prepare`."""


class ForecastAccuracy(
    StartupRecord, event="memory.accuracy", level=logging.INFO, report="memory_forecast"
):
    """What the graphs captured at startup were forecast to take, and what they took, in bytes."""

    forecast: int
    actual: int
    accuracy: float | None


class PhaseCaptured(
    StartupRecord, event="capture.phase", level=logging.INFO, report="capture_phases"
):
    """How many of the planned graphs of a phase were captured at startup, which, and the bytes that
    this took or released."""

    phase: str
    captured: int
    planned: int
    percent: float
    taken: int
    released: int
    shapes: list[str]


class WarmupStep(StartupRecord, event="warmup", level=logging.INFO, report="warmup"):
    """Item `n` `of` warm-up is done; the bytes that this took or released."""

    n: int
    of: int
    kind: str
    shape: str
    ms: float
    taken: int
    released: int
    free_bytes: int | None


class SkippedWarmup(
    StartupRecord, event="warmup.skipped", level=logging.WARNING, report="skipped_warmup"
):
    """A kind of warm-up was left out."""

    kind: str
    shapes: list[str]
    cost: str


class BackgroundPhase(Record, event="background", level=logging.INFO):
    """What the thread that compiles is doing, `seconds` after the start."""

    phase: str
    seconds: float


class BackgroundFailure(Record, event="background.failed", level=logging.WARNING):
    """The model could not be compiled and stays uncompiled."""

    metrics = (
        Metric("piecegraph_background_failures", "Compilations beside serving that failed."),
    )
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

    metrics = (
        Metric(
            "piecegraph_switch_seconds",
            "Seconds from the start until compiled code served.",
            amount=lambda switch: switch.seconds,
            first=True,
        ),
    )
    seconds: float
    steps: int
    ms: float


class LibrariesBuilt(Record, event="background.libraries", level=logging.INFO):
    """The next start has libraries, or `reason` says why not."""

    seconds: float
    reason: str | None


class ShadowStopped(Record, event="shadow.stopped", level=logging.WARNING):
    """No further step is proved: `reason` is a `shadow.Stopped`."""

    reason: str
    detail: str


class WrongStep(Record, event="shadow.wrong", level=logging.ERROR):
    """A step was other than the uncompiled model's. `out_of_service` is a `shadow.Cause`.

    `difference` and `tolerance` are relative to the largest element of the row, in units of its
    dtype's precision; `difference` is None for what has no distance: another shape, a NaN, memory
    that only one wrote. `file` has the step. `changed` is what is known not to be any more as code
    or graph rely on.
    """

    metrics = (
        Metric(
            "piecegraph_wrong_steps",
            "Steps that differed from the uncompiled model, by what was taken out of service.",
            ("out_of_service",),
        ),
    )
    mode: str
    num_tokens: int
    padded: int
    graph_index: int
    difference: float | None
    tolerance: float
    out_of_service: str
    graphs: list[str]
    file: str | None
    changed: str


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
        self.before_prepare: float | None = None
        """Seconds from the start of the process to `prepare`, where that is known."""
        self._kept: dict[type[Record], deque[Record]] = {}

    def began(self) -> None:
        """`prepare` begins."""
        self.before_prepare = Events.process_seconds()
        self.events.emit("process", level=logging.INFO, seconds_before_prepare=self.before_prepare)

    def add(self, record: Record) -> None:
        """Keep a record and emit its event."""
        self._kept.setdefault(type(record), deque(maxlen=KEPT)).append(record)
        self.events.emit(record.event, level=record.level, **record.facts())

    def add_opaque(self, ops: Mapping[str, tuple[int, str]]) -> None:
        """Add the ops that code which serves from now on calls as they are; see `OpaqueOp`."""
        for op, (calls, where) in ops.items():
            self.add(OpaqueOp(op, calls, where))

    def of(self, kind: type[R]) -> list[R]:
        """The records of one kind, oldest first, such as `records.of(CaptureRecord)`."""
        return cast(list[R], list(self._kept.get(kind, ())))

    @property
    def counters(self) -> Counter[str]:
        """Counters of this model: `dynamo_traces`, `cache.hit`, …"""
        return self.events.counters

    @property
    def phases(self) -> list[tuple[str, float]]:
        """Phases of the startup in order, with the seconds that each has for itself; a name can
        repeat. `other` is what no phase inside `prepare` has: with it they add up."""
        spans = sorted(self.events.phases, key=lambda span: span.start + span.seconds)
        return [("other" if span.name == "prepare" else span.name, span.own) for span in spans]

    @property
    def prepare_seconds(self) -> float:
        """Seconds that `prepare` took; 0 for a model that was not made by `prepare`."""
        return sum(span.seconds for span in list(self.events.phases) if span.name == "prepare")
