"""A captured entry of the plan: its recording and what a step needs around it."""

from __future__ import annotations

from typing import Any

from .addresses import Snapshot
from .recording import Recording
from .results import RealResults
from .static_inputs import BoundInputs

ADDRESSES_PER_STEP = 4
"""Watched tensors compared on each replay after the first, going round."""


class CapturedSlot:
    """A recording with its static inputs, its results and the addresses it relies on."""

    __slots__ = ("_addresses", "_inputs", "_replayed", "_results", "recording")

    def __init__(
        self, recording: Recording, inputs: BoundInputs, results: RealResults, addresses: Snapshot
    ) -> None:
        self.recording = recording
        self._inputs = inputs
        self._results = results
        self._addresses = addresses
        self._replayed = False

    def replay(self, tensors: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """One step on real inputs; returns views of the real rows of the static results."""
        if self._replayed:
            self._addresses.check_some(ADDRESSES_PER_STEP)
        else:
            self._addresses.check()
            self._replayed = True
        self._inputs.load(tensors, sizes)
        self.recording.replay()
        return self._results.at(sizes)
