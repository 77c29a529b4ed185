"""One captured graph as steps use it: a recording with the static inputs it reads, views of its
results, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.plan import Plan
from ...dispatch import PlanEntry
from ...errors import BatchExceeded, SizeOutOfRange
from ...torch_compat.basics.tensors import normal_alias
from ..backends.ownership import extent
from ..backends.protocol import FreshResults, Load, Mark, Replay, Sizes
from ..core.check import CheckStep
from ..core.code import ModelCode, real_results
from ..core.static_inputs import BoundInputs
from .recording import Recording

_MOST_KEPT = 256


@dataclass(slots=True, eq=False)
class InstalledGraph:
    """A recording as steps use it: graph `index` of the plan, of `code`.

    `runs_python` says whether a replay runs Python, such as a splitting op between two graphs.
    `checks` are what each of its steps must satisfy.
    """

    index: int
    entry: PlanEntry
    code: ModelCode
    recording: Recording
    inputs: BoundInputs
    replay: Replay
    runs_python: bool
    checks: tuple[CheckStep, ...] = ()

    def has_returned(self, tensor: Tensor) -> bool:
        """Whether `tensor` is on one of the static results."""
        address = tensor.data_ptr()
        outputs = [each for each in self.recording.outputs or () if isinstance(each, Tensor)]
        return any(first <= address < end for first, end in map(extent, outputs))

    def poison(self, overwrite: Callable[[Tensor], object]) -> None:
        """Overwrite the static results, so that code that reads them after the step gets NaN."""
        for output in self.recording.outputs or ():  # none if the graph was evicted
            if isinstance(output, Tensor) and self.recording.ownership.is_made(output):
                with torch.inference_mode():
                    overwrite(output)


class BoundRecording:
    """A recording with its static inputs, see `BoundGraph`. Loaders and results are kept per real
    size, the last 256."""

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
        fresh = (results[0](),) if len(results) == 1 else [each() for each in results]
        if self._inputs.written:
            self._inputs.copy_back(tensors)
        return fresh

    def _prepare(self, sizes: Sizes) -> tuple[Load, FreshResults]:
        if len(self._by_size) >= _MOST_KEPT:
            del self._by_size[next(iter(self._by_size))]
        try:
            load = self._inputs.loader(sizes)
        except SizeOutOfRange as error:
            name, size, most = (error.facts[fact] for fact in ("name", "size", "high"))
            raise BatchExceeded(name=name, size=size, most=most) from None
        real = real_results(self._plan, self._recording.outputs, sizes)
        copied, holds = bool(self._inputs.written), self._inputs.holds
        results = tuple(_fresh(result, copied or holds(result)) for result in real)
        self._by_size[sizes] = load, results
        return load, results


def _fresh(result: Any, copied: bool) -> Callable[[], Any]:
    """A function that returns `result`, a tensor each time as a new object.

    A view of a static input is copied: an engine that passes it on as an input of the next step
    would find the next step's rows in it. So is each result of a model that writes to its inputs:
    if an input is the last result, what is written to it would be in this result, too.
    """
    if not isinstance(result, Tensor):
        return partial(_same, result)
    if copied:
        return result.clone
    # `data` makes the same new tensor as `detach`, in two thirds of the time
    static = normal_alias(result) if result.is_inference() else result
    return partial(attrgetter("data"), static)


def _same(value: Any) -> Any:
    return value
