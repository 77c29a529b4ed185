"""Warm-up before serving: what runs, in which order, why, and its progress.

All that is slow the first time runs here once: each compiled range at both ends, the captures of
the strategy, and tasks of the engine. Random state is restored, and dummy batches write only where
padding writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

from ...compile.ir.plan import Symbol
from ...config import check_choice
from ...dispatch import DispatchPlan
from ..backends.protocol import Memory
from ..core.allowed_work import allow_compilation
from ..core.records import CaptureRecord, Records, SkippedWarmup, WarmupStep
from .dummy_batch import preserve_rng_state


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
    """One item of warm-up. A capture has no `run`: the strategy makes all of them."""

    kind: WarmupKind
    shape: str
    why: str
    run: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class AuxiliaryTask:
    """Work of the engine beside the model: `run` is called with each of `shapes` in order.

    It must leave the engine's state unchanged.
    """

    name: str
    shapes: Sequence[Any]
    why: str
    run: Callable[[Any], None]

    def items(self) -> list[WarmupItem]:
        kind, run = WarmupKind.AUXILIARY, self.run
        return [
            WarmupItem(kind, f"{self.name} {shape}", self.why, partial(run, shape))
            for shape in self.shapes
        ]


def run_warmup(
    items: Sequence[WarmupItem],
    capture: Callable[..., None],
    plan: DispatchPlan,
    skip: Collection[str],
    records: Records,
    memory: Callable[[], Memory],
    show: Callable[[str], None],
) -> None:
    """Run compiled ranges, `capture(progress=…)`, which captures the startup set, and the rest.

    Kinds in `skip` are left out. `show` is called with a line for each item that is done. Raises
    InvalidSetting for an unknown kind.
    """
    for name in skip:
        check_choice(COST, "skip", name, "there is no such kind of warm-up")
    facts = [{"kind": item.kind, "shape": item.shape, "why": item.why} for item in items]
    records.events.emit("warmup.plan", items=facts)
    skipped = [item for item in items if item.kind in skip]
    for kind in dict.fromkeys(item.kind for item in skipped):
        shapes = [item.shape for item in skipped if item.kind is kind]
        records.add(SkippedWarmup(kind.value, shapes, COST[kind]))
    number, of = count(1), len(items) - len(skipped)
    before = memory()

    def done(kind: WarmupKind, shape: str, ms: float) -> None:
        nonlocal before
        n, now = next(number), memory()
        growth, before = now.growth(before), now
        limited = now.free < 1 << 60  # a CPU has no limit
        free = now.free if limited else None
        records.add(WarmupStep(n, of, kind.value, shape, ms, max(0, growth), max(0, -growth), free))
        change = f", {abs(growth)} bytes {'released' if growth < 0 else 'taken'}"
        left = f", {free} bytes free" if limited else ""
        show(f"{n} of {of}: {kind.value} {shape}, {ms:.1f} ms{change}{left}")

    def captured(graph: CaptureRecord) -> None:
        done(WarmupKind.CAPTURE, plan.entries[graph.graph_index].shape, graph.ms)

    def run(kind: WarmupKind) -> None:
        for item in items:
            if item.kind is kind and item.run is not None and kind not in skip:
                began = perf_counter()
                with allow_compilation(), preserve_rng_state():
                    item.run()
                done(kind, item.shape, (perf_counter() - began) * 1000)

    run(WarmupKind.RANGE)
    if WarmupKind.CAPTURE not in skip:
        capture(progress=captured)
    run(WarmupKind.AUXILIARY)


def range_items(
    symbols: Sequence[Symbol], run: Callable[[Mapping[str, int]], None]
) -> Iterator[WarmupItem]:
    """Both ends of the compiled ranges, the large one first: workspaces then grow once."""
    largest = {symbol.label: symbol.high for symbol in symbols}
    smallest = {symbol.label: symbol.low for symbol in symbols}
    for end, sizes in (("largest", largest), ("smallest", smallest)):
        shape = ", ".join(f"{name} {size}" for name, size in sizes.items())
        why = f"the {end} sizes that were compiled"
        yield WarmupItem(WarmupKind.RANGE, shape, why, partial(run, sizes))


def capture_items(indices: Iterable[int], plan: DispatchPlan) -> Iterator[WarmupItem]:
    """The graphs that are captured at startup, in order."""
    for graph_index in indices:
        shape = plan.entries[graph_index].shape
        yield WarmupItem(WarmupKind.CAPTURE, shape, "steps up to this size replay it")
