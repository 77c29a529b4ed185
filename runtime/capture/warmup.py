"""Warm-up before serving: what runs, in which order, why, and its progress.

All that is slow the first time runs here once: each compiled range at both ends, the captures of
the strategy, and tasks of the engine. Random state is restored, and dummy batches write only where
padding writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

RANGE, CAPTURE = "range", "capture"

COST = {
    RANGE: "the first step of each size loads kernels and grows workspaces",
    CAPTURE: "every step runs without a graph until it is captured",
}
"""What it costs to skip a kind; a task states its own cost."""


@dataclass(frozen=True, slots=True)
class WarmupItem:
    """One item of warm-up; `kind` is RANGE, CAPTURE or the name of a task.

    A capture has no `run`: the strategy makes all of them.
    """

    kind: str
    shape: str
    why: str
    run: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class AuxiliaryTask:
    """Work of the engine beside the model: `run` is called with each of `shapes` in order.

    The calls together must leave the engine's state unchanged. `cost` is logged if the task is
    skipped, or has no shapes: what the first requests pay.
    """

    name: str
    shapes: Sequence[Any]
    why: str
    run: Callable[[Any], None]
    cost: str = "the first request that needs it waits for its kernels"

    def items(self) -> list[WarmupItem]:
        return [
            WarmupItem(self.name, str(shape), self.why, partial(self.run, shape))
            for shape in self.shapes
        ]


def run_warmup(
    items: Sequence[WarmupItem],
    tasks: Sequence[AuxiliaryTask],
    capture: Callable[..., None],
    plan: DispatchPlan,
    skip: Collection[str],
    records: Records,
    memory: Callable[[], Memory],
    show: Callable[[str], None],
) -> None:
    """Run compiled ranges, `capture(progress=…)`, which captures the startup set, and `tasks`.

    Kinds in `skip`, which may name tasks, are left out. `show` is called with a line for each item
    that is done. Raises InvalidSetting for an unknown kind.
    """
    costs = COST | {task.name: task.cost for task in tasks}
    for name in skip:
        check_choice(costs, "skip", name, "there is no such kind of warm-up")
    items = [*items, *(item for task in tasks for item in task.items())]
    facts = [{"kind": item.kind, "shape": item.shape, "why": item.why} for item in items]
    records.events.emit("warmup.plan", items=facts)
    empty = [task.name for task in tasks if not task.shapes]
    for kind, cost in costs.items():
        shapes = [item.shape for item in items if item.kind == kind]
        if kind in empty or (shapes and kind in skip):
            records.add(SkippedWarmup(kind, shapes, cost))
    items = [item for item in items if item.kind not in skip]
    number, of = count(1), len(items)
    before = memory()

    def done(kind: str, shape: str, ms: float) -> None:
        nonlocal before
        n, now = next(number), memory()
        growth, before = now.growth(before), now
        limited = now.free < 1 << 60  # a CPU has no limit
        free = now.free if limited else None
        records.add(WarmupStep(n, of, kind, shape, ms, max(0, growth), max(0, -growth), free))
        change = f", {abs(growth)} bytes {'released' if growth < 0 else 'taken'}"
        left = f", {free} bytes free" if limited else ""
        show(f"{n} of {of}: {kind} {shape}, {ms:.1f} ms{change}{left}")

    def captured(graph: CaptureRecord) -> None:
        done(CAPTURE, plan.entries[graph.graph_index].shape, graph.ms)

    def run(kind: str) -> None:
        calls = [(item.shape, item.run) for item in items if item.kind == kind and item.run]
        if not calls:
            return
        shapes = [shape for shape, _ in calls]
        with records.events.span(f"warmup.{kind}", level=logging.INFO, shapes=shapes):
            for shape, call in calls:
                began = perf_counter()
                with allow_compilation(), preserve_rng_state():
                    call()
                done(kind, shape, (perf_counter() - began) * 1000)

    run(RANGE)
    if CAPTURE not in skip:
        capture(progress=captured)
    for task in tasks:
        run(task.name)


def range_items(
    symbols: Sequence[Symbol], run: Callable[[Mapping[str, int]], None]
) -> Iterator[WarmupItem]:
    """Both ends of the compiled ranges, the large one first: workspaces then grow once."""
    largest = {symbol.label: symbol.high for symbol in symbols}
    smallest = {symbol.label: symbol.low for symbol in symbols}
    for end, sizes in (("largest", largest), ("smallest", smallest)):
        shape = ", ".join(f"{name} {size}" for name, size in sizes.items())
        why = f"the {end} sizes that were compiled"
        yield WarmupItem(RANGE, shape, why, partial(run, sizes))


def capture_items(indices: Iterable[int], plan: DispatchPlan) -> Iterator[WarmupItem]:
    """The graphs that are captured at startup, in order."""
    for graph_index in indices:
        shape = plan.entries[graph_index].shape
        yield WarmupItem(CAPTURE, shape, "steps up to this size replay it")
