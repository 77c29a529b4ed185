"""The runs of a proof on several ranks: the same ones in the same order, and one verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ...core.exchange import Exchange

Way = str | int
"""What is run: the model, the code, or a graph by its index. All ranks can run it."""


class Lockstep:
    """Makes the runs of one proof alike on all ranks, since they run the model's collectives.

    Which runs a proof needs depends on what a rank has found so far. So ranks state the run that
    each needs next, all make that of the first rank that needs one, and so on until none does.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def run(self, way: Way, perform: Callable[[Way], Any]) -> Any:
        """What `perform(way)` gives on this rank."""
        while (turn := self._turn(way)[0]) != way:
            self._help(turn, perform)
        return perform(way)

    def finish(
        self, verdict: Mapping[str, Any], perform: Callable[[Way], Any]
    ) -> list[dict[str, Any]]:
        """This rank needs no further run. The verdicts of all ranks, when none does."""
        while True:
            turn, verdicts = self._turn(None, verdict)
            if turn is None:
                return verdicts
            self._help(turn, perform)

    def _turn(
        self, way: Way | None, verdict: Mapping[str, Any] | None = None
    ) -> tuple[Way | None, list[Any]]:
        """The run that is made now; the verdicts so far."""
        stated = self._exchange("proof of a step", {"run": way, "verdict": verdict})
        ways = (one["run"] for one in stated)
        turn = next((one for one in ways if one is not None), None)
        return turn, [one["verdict"] for one in stated]

    def _help(self, turn: Way | None, perform: Callable[[Way], Any]) -> None:
        """Make a run that another rank needs. What it gives here matters to nobody."""
        assert turn is not None
        with suppress(Exception):
            perform(turn)
