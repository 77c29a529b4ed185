"""A captured entry of the plan: its recording and what a step needs around it."""

from __future__ import annotations

from typing import Any

from .addresses import Snapshot
from .recording import Recording
from .results import RealResults
from .static_inputs import BoundInputs


class CapturedSlot:
    """A recording with its static inputs, its results and the addresses it relies on."""

    __slots__ = ("_inputs", "_results", "addresses", "recording")

    def __init__(
        self, recording: Recording, inputs: BoundInputs, results: RealResults, addresses: Snapshot
    ) -> None:
        self.recording = recording
        self._inputs = inputs
        self._results = results
        self.addresses = addresses

    def replay(self, tensors: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """One step on real inputs; returns views of the real rows of the static results.

        Raises MovedTensor if something that the recording reads is elsewhere.
        """
        self.addresses.check_step()
        self._inputs.load(tensors, sizes)
        for call in self.recording.calls:
            call()
        return self._results.at(sizes)
