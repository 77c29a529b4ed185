"""Notices that a model is no longer what its trace relied on: an adapter switched, a hook added.

Compiled code and graphs hold what the model was. What a warm start checks of the model is checked
while it serves, too: all that the trace relied on by `refresh`, and before each step a part of
what is on the model itself, in turn. Of a model that is not traced its state is compared, as long
as there are graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import perf_counter

from ....compile.conditions.conditions import BrokenCondition
from ....errors import ModelChanged

SHARE = 0.01
"""The part of the time of steps that checks may take. A change is noticed when a check of all comes
to it: one that takes 20 ms is done in 2 s of steps."""

MOST_S = 1e-4
"""Seconds that checks before one step may take, also after a pause."""

OWN_FORWARD = ("model.forward", "model in __dict__ 'forward'")

_CHANGED = 0.0

SHOWN = 3
"""How many changes an error names."""


Checked = Callable[[], Iterable[BrokenCondition | None]]
"""Looks at all places once: yields what is different there, and None after each."""


class ModelCheck:
    """Checks the model by `checked`, except at the places in `accepted`.

    `all_checked` looks at more than a step has time for: globals, classes, the environment.
    """

    def __init__(
        self, checked: Checked, accepted: set[str], all_checked: Checked | None = None
    ) -> None:
        self._checked = checked
        self._all_checked = all_checked or checked
        self._accepted = accepted
        self._places = self._in_turn()
        self._due = perf_counter()  # before that a step pays for one look at the clock

    def changes(self) -> list[BrokenCondition]:
        """What is different from what the trace relied on."""
        return [each for each in self._each_place(self._all_checked) if each is not None]

    def accept(self) -> list[str]:
        """Check the places that are different now no more; returns the changes."""
        changes = self.changes()
        self._accepted |= {each.what for each in changes}
        return [str(each) for each in changes]

    def check(self) -> None:
        """Check all. Raises ModelChanged."""
        changes = [str(each) for each in self.changes()]
        if changes:
            self._due = _CHANGED
            more = f"; {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
            raise ModelChanged(changes="; ".join(changes[:SHOWN]) + more)

    def check_step(self, context: object = None, tensors: object = None) -> None:
        """Check as many places as the time since the last step allows. Raises ModelChanged.

        What has changed is an error in each step until it is undone.
        """
        began = now = perf_counter()
        if began < self._due:
            return
        if self._due == _CHANGED:
            self.check()
            self._due = began
        until = began + min(SHARE * (began - self._due), MOST_S)
        while now <= until:
            if next(self._places) is not None:
                self.check()
            now = perf_counter()
        self._due = now + (now - until) / SHARE

    def _each_place(self, checked: Checked) -> Iterator[BrokenCondition | None]:
        """Without the model's own forward: an engine replaces it by one that runs steps."""
        for broken in checked():
            accepted = broken is not None and (
                broken.what in self._accepted or broken.what.startswith(OWN_FORWARD)
            )
            yield None if accepted else broken

    def _in_turn(self) -> Iterator[BrokenCondition | None]:
        while True:
            yield from self._each_place(self._checked)
            yield None
