"""One captured graph as steps use it: a recording with the static inputs it reads, views of its
results, and the addresses it relies on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.plan import Plan
from ...errors import BatchExceeded, SizeOutOfRange
from ...torch_compat.basics.tensors import normal_alias
from ..backends.protocol import FreshResults, Load, Mark, Replay, Sizes
from ..core.code import real_results
from ..core.static_inputs import BoundInputs
from ..parts.checks.address_checks import MetadataAddresses, Snapshot
from ..parts.checks.step_reads import StepReads
from ..parts.log.profiler_ranges import call_names, piece_names, ranged
from .recording import Recording, SegmentKind, run_calls

_MOST_KEPT = 256


@dataclass(slots=True, eq=False)
class InstalledGraph:
    """A recording as steps use it, and what a step that replays it must satisfy.

    `runs_python` says whether a replay runs Python, such as a splitting op between two graphs.
    """

    recording: Recording
    replay: Replay
    addresses: Snapshot
    metadata: MetadataAddresses | None
    runs_python: bool
    reads: StepReads | None = field(init=False)

    def __post_init__(self) -> None:
        self.reads = self.recording.reads or None

    def poison(self, overwrite: Callable[[Tensor], object]) -> None:
        """Overwrite the static results, so that code that reads them after the step gets NaN."""
        for output in self.recording.outputs or ():  # none if the graph was evicted
            if isinstance(output, Tensor) and self.recording.ownership.is_made(output):
                with torch.inference_mode():
                    overwrite(output)


class BoundRecording:
    """A recording with its static inputs, see `BoundGraph`. Loaders and results are kept per real
    size, the last 256."""

    __slots__ = ("_by_size", "_inputs", "_plan", "_recording")

    def __init__(self, recording: Recording, inputs: BoundInputs, plan: Plan) -> None:
        self._recording = recording
        self._inputs = inputs
        self._plan = plan
        self._by_size: dict[Sizes, tuple[Load, FreshResults]] = {}

    @property
    def calls(self) -> Sequence[Callable[[], None]]:
        return self._recording.calls

    @property
    def outputs(self) -> Any:
        return self._recording.outputs

    @property
    def copied_inputs(self) -> Sequence[Tensor]:
        return self._inputs.copied

    def at(self, sizes: Sizes) -> tuple[Load, FreshResults]:
        return self._by_size.get(sizes) or self._prepare(sizes)

    def copy_back(self, tensors: tuple[Any, ...]) -> None:
        self._inputs.copy_back(tensors)

    def replay(self, tensors: tuple[Any, ...], sizes: Sizes, copied: Mark) -> Sequence[Any]:
        load, results = self._by_size.get(sizes) or self._prepare(sizes)
        load(tensors)
        copied()
        self._recording.replay()
        if self._inputs.written:
            self._inputs.copy_back(tensors)
        return (results[0](),) if len(results) == 1 else [fresh() for fresh in results]

    def _prepare(self, sizes: Sizes) -> tuple[Load, FreshResults]:
        if len(self._by_size) >= _MOST_KEPT:
            del self._by_size[next(iter(self._by_size))]
        try:
            load = self._inputs.loader(sizes)
        except SizeOutOfRange as error:
            name, size, most = (error.facts[fact] for fact in ("name", "size", "high"))
            raise BatchExceeded(name=name, size=size, most=most) from None
        real = real_results(self._plan, self._recording.outputs, sizes)
        results = tuple(_fresh(result, self._inputs.holds(result)) for result in real)
        self._by_size[sizes] = load, results
        return load, results


def name_segments(recording: Recording, plan: Plan) -> None:
    """Replay each segment of `recording` in a range, by the pieces and ops that it holds."""
    graphs = [each for each in recording.segments if each.kind is SegmentKind.GRAPH]
    pieces, calls = iter(piece_names(plan)), iter(call_names(plan))
    one_per_piece = len(graphs) == len(plan.piece_uses()) > 1
    named, last = [], ""
    for segment in recording.segments:
        for index, call in enumerate(segment.calls):
            if segment.kind is SegmentKind.EAGER:
                name = next(calls, f"op {segment.names[index]}")
                last = f" after {segment.names[index]}" if not plan.calls() else ""
            else:
                name = next(pieces) if one_per_piece else f"graph {recording.name}{last}"
            named.append(ranged(name, call))
    recording.replay = partial(run_calls, tuple(named))


def _fresh(result: Any, of_input: bool) -> Callable[[], Any]:
    """A function that returns `result`, a tensor each time as a new object.

    A view of a static input is copied: an engine that passes it on as an input of the next step
    would find the next step's rows in it.
    """
    if not isinstance(result, Tensor):
        return partial(_same, result)
    if of_input:
        return result.clone
    # `data` makes the same new tensor as `detach`, in two thirds of the time
    static = normal_alias(result) if result.is_inference() else result
    return partial(attrgetter("data"), static)


def _same(value: Any) -> Any:
    return value
