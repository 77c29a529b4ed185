"""Notices that a model is no longer what its trace relied on: an adapter switched, a hook added.

Compiled code and graphs hold what the model was. What a warm start checks of the model is checked
while it serves, too: all of it by `refresh`, and before each step a part, in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from ...compile.conditions.conditions import BrokenCondition, checked
from ...compile.plan.compiled_model import CompiledModel
from ...errors import ModelChanged

SHARE = 0.01
"""The part of the time of steps that checks may take. A change is noticed when a check of all comes
to it: one that takes 20 ms is done in 2 s of steps."""

MOST_S = 1e-4
"""Seconds that checks before one step may take, also after a pause."""

OWN_FORWARD = ("model.forward", "model in __dict__ 'forward'")

SHOWN = 3
"""How many changes an error names."""


class ModelCheck:
    """Checks the conditions of one trace on its model."""

    __slots__ = ("_changed", "_compiled", "_last", "_places", "_seconds")

    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled = compiled
        self._changed = False
        self._places = _in_turn(compiled)
        self._last = perf_counter()
        self._seconds = 0.0  # that checks may take now; below zero if the last one took longer

    def check(self) -> None:
        """Check all of the model. Raises ModelChanged."""
        changes = [str(each) for each in _places(self._compiled) if each is not None]
        self._changed = bool(changes)
        if changes:
            more = f"; {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
            raise ModelChanged(changes="; ".join(changes[:SHOWN]) + more)

    def check_step(self) -> None:
        """Check as many places as the time since the last step allows. Raises ModelChanged.

        What has changed is an error in each step until it is undone.
        """
        if self._changed:
            self.check()
        now = perf_counter()
        self._seconds = min(self._seconds + SHARE * (now - self._last), MOST_S)
        self._last = now
        while self._seconds > 0:
            if next(self._places) is not None:
                self.check()
            then, now = now, perf_counter()
            self._seconds -= now - then


def _places(compiled: CompiledModel) -> Iterator[BrokenCondition | None]:
    """Without the model's own forward: an engine replaces it by one that runs steps."""
    for broken in checked(compiled.conditions or {}, compiled.model):
        own_forward = broken is not None and broken.what.startswith(OWN_FORWARD)
        yield None if own_forward else broken


def _in_turn(compiled: CompiledModel) -> Iterator[BrokenCondition | None]:
    while True:
        yield from _places(compiled)
        yield None
