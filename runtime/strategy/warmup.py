"""Warm-up as data: what runs before serving, in which order, and why; then running it.

Whatever is slow the first time runs here once: each compiled range at both its ends, the captures
of the strategy, and tasks of the engine's own. Warm-up leaves no trace: random state is put back,
and dummy batches write where padding writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from time import perf_counter
from typing import Any

from ...compile.ir.plan import Symbol
from ...dispatch import DispatchPlan
from ..backends.protocol import Memory
from ..capture.dummy_batch import preserve_rng_state
from ..check_choice import must_be_one_of
from ..records import CaptureRecord, Records, SkippedWarmup, WarmupStep
from .monitors import meant
from .queue import CaptureQueue


class WarmupKind(StrEnum):
    RANGE = "range"
    CAPTURE = "capture"
    AUXILIARY = "auxiliary"


COST = {
    WarmupKind.RANGE: "the first step of each size loads kernels and grows workspaces",
    WarmupKind.CAPTURE: "every step runs without a graph until it is captured",
    WarmupKind.AUXILIARY: "the first request that needs it waits for its kernels",
}
"""What it costs to skip a kind."""


@dataclass(frozen=True, slots=True)
class WarmupItem:
    """One thing that warm-up does."""

    kind: WarmupKind
    shape: str
    why: str


Work = tuple[WarmupItem, Callable[[], None]]


@dataclass(frozen=True, slots=True)
class AuxiliaryTask:
    """Work of the engine beside the model: `run` is called with each of `shapes` in order.

    It must leave the engine's state as it was.
    """

    name: str
    shapes: Sequence[Any]
    why: str
    run: Callable[[Any], None]

    def works(self) -> list[Work]:
        return [
            (
                WarmupItem(WarmupKind.AUXILIARY, f"{self.name} {shape}", self.why),
                partial(self.run, shape),
            )
            for shape in self.shapes
        ]


def warm_up(
    ranges: Sequence[Work],
    captures: Sequence[WarmupItem],
    capture: Callable[..., None],
    tasks: Sequence[AuxiliaryTask],
    skip: Collection[str],
    memory: Callable[[], Memory],
    records: Records,
    show: Callable[[str], None],
) -> None:
    """Run `ranges`, then `capture`, which makes the graphs `captures`, then `tasks`.

    `skip` names kinds to leave out; raises InvalidSetting for an unknown one. The plan, each item
    that is done and what was skipped become events; `show` is given a line for each.
    """
    for kind in skip:
        must_be_one_of(COST, "skip", kind, "there is no such kind of warm-up")
    auxiliary = [work for task in tasks for work in task.works()]
    plan = [*(item for item, _ in ranges), *captures, *(item for item, _ in auxiliary)]
    progress = _Progress([item for item in plan if item.kind not in skip], memory, records, show)
    records.events.emit("warmup.plan", items=[asdict(item) for item in plan])
    _record_skipped([item for item in plan if item.kind in skip], records)
    for item, work in ranges:
        progress.run(item, work)
    if WarmupKind.CAPTURE not in skip:
        capture(progress=progress.captured)
    for item, work in auxiliary:
        progress.run(item, work)


def range_works(symbols: Iterable[Symbol], run: Callable[[Mapping[str, int]], None]) -> list[Work]:
    """Both ends of what the pieces are compiled for, the large one first: workspaces grow once."""
    symbols = list(symbols)
    ends = (
        ("largest", {symbol.label: symbol.high for symbol in symbols}),
        ("smallest", {symbol.label: symbol.low for symbol in symbols}),
    )
    return [
        (
            WarmupItem(
                WarmupKind.RANGE,
                ", ".join(f"{name} {size}" for name, size in sizes.items()),
                f"the {end} sizes that were compiled",
            ),
            partial(run, sizes),
        )
        for end, sizes in ends
    ]


def capture_items(queue: CaptureQueue, plan: DispatchPlan) -> list[WarmupItem]:
    """The graphs that the strategy wants at startup, in their order."""
    entries = [plan.entries[group[0]] for group in queue.startup()]
    why = "steps up to this size replay it"
    return [
        WarmupItem(WarmupKind.CAPTURE, f"{entry.mode.name} {entry.descriptor.num_tokens}", why)
        for entry in entries
    ]


def _record_skipped(skipped: Sequence[WarmupItem], records: Records) -> None:
    for kind in dict.fromkeys(item.kind for item in skipped):
        shapes = [item.shape for item in skipped if item.kind is kind]
        records.add(SkippedWarmup(kind.value, shapes, COST[kind]))


class _Progress:
    """How many items are done, and what each took."""

    def __init__(
        self,
        items: Sequence[WarmupItem],
        memory: Callable[[], Memory],
        records: Records,
        show: Callable[[str], None],
    ) -> None:
        self._items = items
        self._memory = memory
        self._records = records
        self._show = show
        self._done = 0

    def run(self, item: WarmupItem, work: Callable[[], None]) -> None:
        """Do one item, unless it is skipped."""
        if item in self._items:
            began = perf_counter()
            with meant(), preserve_rng_state():
                work()
            self._tell(item.kind, item.shape, (perf_counter() - began) * 1000)

    def captured(self, capture: CaptureRecord) -> None:
        """A graph was captured."""
        self._tell(WarmupKind.CAPTURE, f"{capture.mode} {capture.num_tokens}", capture.ms)

    def _tell(self, kind: WarmupKind, shape: str, ms: float) -> None:
        self._done += 1
        n, of, free = self._done, len(self._items), self._memory().measured_free
        self._records.add(WarmupStep(n, of, kind.value, shape, ms, free))
        left = "" if free is None else f", {free} bytes free"
        self._show(f"{n} of {of}: {kind.value} {shape}, {ms:.1f} ms{left}")
