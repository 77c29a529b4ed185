"""One captured graph as steps use it: a recording with the static inputs it reads, views of its
results, and the addresses it relies on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.plan import Plan
from ...errors import BatchExceeded, SizeOutOfRange
from ...torch_compat.basics.tensors import normal_alias
from ..backends.replay.tape import poison
from ..core.code import real_results
from ..core.static_inputs import BoundInputs, Load, Mark, Sizes
from ..parts.checks.address_checks import MetadataAddresses, Snapshot
from ..parts.log.profiler_ranges import call_names, piece_names, ranged
from .recording import Recording, SegmentKind, run_calls

_MOST_KEPT = 256

FreshResults = tuple[Callable[[], Any], ...]
"""A function for each result: a new tensor on static memory, so that what a caller does to it,
such as `unsqueeze_`, changes no later step."""


class InstalledGraph:
    """A recording as steps use it. Loaders and results are kept per real size, the last 256."""

    __slots__ = (
        "_by_size", "_inputs", "_plan", "addresses", "metadata", "reads", "recording",
        "runs_python",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        recording: Recording,
        inputs: BoundInputs,
        addresses: Snapshot,
        metadata: MetadataAddresses | None,
        runs_python: bool,
    ) -> None:
        self.recording = recording
        self.runs_python = runs_python  # also between its graphs
        self.addresses = addresses
        self.metadata = metadata
        self.reads = recording.reads or None
        self._plan = plan
        self._inputs = inputs
        self._by_size: dict[tuple[int, ...], tuple[Load, FreshResults]] = {}

    def replay(self, tensors: tuple[Any, ...], sizes: Sizes, copied: Mark) -> Sequence[Any]:
        """Run one step on the real inputs; returns the real rows of the static results.

        `copied` is called when the copies of inputs are queued, before the rest. Raises MovedTensor
        if a tensor that the recording reads was moved, BatchExceeded for inputs larger than the
        padded sizes.
        """
        self.addresses.check_step()
        load, results = self._by_size.get(sizes) or self._prepare(sizes)
        load(tensors)
        copied()
        self.recording.replay()
        return (results[0](),) if len(results) == 1 else [fresh() for fresh in results]

    def poison(self) -> None:
        """Overwrite the static results, so that code that reads them after the step gets NaN."""
        for output in self.recording.outputs or ():  # none if the graph was evicted
            if isinstance(output, Tensor) and self.recording.ownership.is_made(output):
                with torch.inference_mode():
                    poison(output)

    def _prepare(self, sizes: tuple[int, ...]) -> tuple[Load, FreshResults]:
        if len(self._by_size) >= _MOST_KEPT:
            del self._by_size[next(iter(self._by_size))]
        try:
            load = self._inputs.loader(sizes)
        except SizeOutOfRange as error:
            name, size, most = (error.facts[fact] for fact in ("name", "size", "high"))
            raise BatchExceeded(name=name, size=size, most=most) from None
        real = real_results(self._plan, self.recording.outputs, sizes)
        results = tuple(_fresh(result, self._inputs.holds(result)) for result in real)
        self._by_size[sizes] = load, results
        return load, results


class WritingGraph(InstalledGraph):
    """A graph of a model that writes to its inputs; what it wrote is copied to the caller's."""

    __slots__ = ()

    def replay(self, tensors: tuple[Any, ...], sizes: Sizes, copied: Mark) -> Sequence[Any]:
        results = super().replay(tensors, sizes, copied)
        self._inputs.copy_back(tensors)
        return results


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
