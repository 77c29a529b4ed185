"""Warm-up before serving: what runs, in which order, why, and its progress.

All that is slow the first time runs here once: each compiled range at both ends, the captures of
the strategy, and tasks of the engine. Random state is restored, and dummy batches write only where
padding writes.
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
from ..after_seal import allow_compilation
from ..backends.protocol import Memory
from ..config import check_choice
from ..records import CaptureRecord, Records, SkippedWarmup, WarmupStep
from .dummy_batch import preserve_rng_state
from .wanted import CaptureQueue


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
    """One item of warm-up."""

    kind: WarmupKind
    shape: str
    why: str


RunnableItem = tuple[WarmupItem, Callable[[], None]]


@dataclass(frozen=True, slots=True)
class AuxiliaryTask:
    """Work of the engine beside the model: `run` is called with each of `shapes` in order.

    It must leave the engine's state unchanged.
    """

    name: str
    shapes: Sequence[Any]
    why: str
    run: Callable[[Any], None]

    def items(self) -> list[RunnableItem]:
        return [
            (
                WarmupItem(WarmupKind.AUXILIARY, f"{self.name} {shape}", self.why),
                partial(self.run, shape),
            )
            for shape in self.shapes
        ]


class WarmupProgress:
    """Records each finished item of `of` in total, and passes a line of text to `show`."""

    def __init__(
        self, records: Records, memory: Callable[[], Memory], show: Callable[[str], None]
    ) -> None:
        self.records = records
        self.of = 0
        self._memory = memory
        self._show = show
        self._done = 0

    def captured(self, capture: CaptureRecord) -> None:
        """A graph was captured."""
        self.done(WarmupKind.CAPTURE, f"{capture.mode} {capture.num_tokens}", capture.ms)

    def done(self, kind: WarmupKind, shape: str, ms: float) -> None:
        """One item is finished and took `ms`."""
        self._done += 1
        n, of, free = self._done, self.of, self._memory().measured_free
        self.records.add(WarmupStep(n, of, kind.value, shape, ms, free))
        left = "" if free is None else f", {free} bytes free"
        self._show(f"{n} of {of}: {kind.value} {shape}, {ms:.1f} ms{left}")


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """`ranges`, then the captures, then the engine's `tasks`; the kinds in `skip` are left out.

    Raises InvalidSetting for an unknown kind.
    """

    ranges: Sequence[RunnableItem]
    captures: Sequence[WarmupItem]
    tasks: Sequence[AuxiliaryTask]
    skip: Collection[str]

    def __post_init__(self) -> None:
        for kind in self.skip:
            check_choice(COST, "skip", kind, "there is no such kind of warm-up")

    def run(self, capture: Callable[..., None], progress: WarmupProgress) -> None:
        """Run all items in order; `capture(progress=…)` captures the startup set."""
        auxiliary = [item for task in self.tasks for item in task.items()]
        items = [*(i for i, _ in self.ranges), *self.captures, *(i for i, _ in auxiliary)]
        records = progress.records
        records.events.emit("warmup.plan", items=[asdict(item) for item in items])
        skipped = [item for item in items if item.kind in self.skip]
        for kind in dict.fromkeys(item.kind for item in skipped):
            shapes = [item.shape for item in skipped if item.kind is kind]
            records.add(SkippedWarmup(kind.value, shapes, COST[kind]))
        progress.of = len(items) - len(skipped)
        self._run(self.ranges, progress)
        if WarmupKind.CAPTURE not in self.skip:
            capture(progress=progress.captured)
        self._run(auxiliary, progress)

    def _run(self, items: Sequence[RunnableItem], progress: WarmupProgress) -> None:
        for item, run in items:
            if item.kind not in self.skip:
                began = perf_counter()
                with allow_compilation(), preserve_rng_state():
                    run()
                progress.done(item.kind, item.shape, (perf_counter() - began) * 1000)


def range_tasks(
    symbols: Iterable[Symbol], run: Callable[[Mapping[str, int]], None]
) -> list[RunnableItem]:
    """Both ends of the compiled ranges, the large one first: workspaces then grow once."""
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
    """The graphs that the strategy captures at startup, in order."""
    entries = [plan.entries[group[0]] for group in queue.startup()]
    why = "steps up to this size replay it"
    return [
        WarmupItem(WarmupKind.CAPTURE, f"{entry.mode.name} {entry.descriptor.num_tokens}", why)
        for entry in entries
    ]
