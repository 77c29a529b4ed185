"""A captured entry of the plan: its recording and what a step needs around it."""

from __future__ import annotations

from typing import Any

from ...compile.ir.plan import Plan
from ...errors import BatchExceeded, SizeOutOfRange
from ..step.address_checks import Snapshot
from ..step.static_inputs import BoundInputs, Load
from .recording import Recording
from .results import real_results

_KEPT = 4096


class CapturedGraph:
    """A recording with its static inputs, its results and the addresses it relies on.

    How a batch gets in and what comes out depend on its real sizes alone; both are kept by size.
    """

    __slots__ = ("_fits", "_inputs", "_plan", "addresses", "recording")

    def __init__(
        self, plan: Plan, recording: Recording, inputs: BoundInputs, addresses: Snapshot
    ) -> None:
        self.recording = recording
        self.addresses = addresses
        self._plan = plan
        self._inputs = inputs
        self._fits: dict[tuple[int, ...], tuple[Load, tuple[Any, ...]]] = {}

    def replay(self, tensors: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """One step on real inputs; returns views of the real rows of the static results.

        Raises MovedTensor if something that the recording reads is elsewhere, BatchExceeded for
        inputs that are larger than the batch was said to be.
        """
        self.addresses.check_step()
        fit = self._fits.get(sizes) or self._fit(sizes)
        fit[0](tensors)
        for call in self.recording.calls:
            call()
        return fit[1]

    def _fit(self, sizes: tuple[int, ...]) -> tuple[Load, tuple[Any, ...]]:
        if len(self._fits) >= _KEPT:
            self._fits.clear()
        try:
            load = self._inputs.loader(sizes)
        except SizeOutOfRange as beyond:
            name, size, most = (beyond.facts[fact] for fact in ("name", "size", "high"))
            raise BatchExceeded(name=name, size=size, most=most) from None
        results = real_results(self._plan, self.recording.outputs, sizes)
        fit = self._fits[sizes] = load, results
        return fit


class WritingGraph(CapturedGraph):
    """A graph of a model that writes to its inputs, of which a recording has copies."""

    __slots__ = ()

    def replay(self, tensors: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
        results = super().replay(tensors, sizes)
        self._inputs.give_back(tensors)
        return results
