"""Which graphs exist, without a part that decides it: all of the plan, captured at startup."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from ..core.records import CaptureRecord
from .captures import Captures
from .session import CaptureSession

Progress = Callable[[CaptureRecord], None]
"""Called after each capture of a startup set."""


class Capturer(Protocol):
    """Decides which graphs of a plan exist."""

    def wanted_at_startup(self) -> list[int]:
        """The graphs that `startup` will try to capture, in order."""

    def startup(self, progress: Progress | None = None, *, serving: bool = False) -> None:
        """Capture the startup set, or what is missing of it.

        In `serving`, between two steps, a dummy batch that fails is no error.
        """

    def startup_while_serving(self) -> None:
        """Capture the startup set while steps run, now or between them."""

    def recapture(self, indices: Collection[int]) -> None:
        """Free stale graphs, all of them before the first is captured again."""

    def take_out(self, indices: Collection[int]) -> None:
        """Free graphs that are never captured again."""

    def released(self) -> None:
        """All graphs were freed: start over."""

    def left(self, used: Mapping[int, int]) -> None:
        """All graphs were freed, and those that there were return while steps run, the most `used`
        first: by steps of each graph so far."""


class CaptureAll:
    """Captures every graph of the plan at startup."""

    def __init__(self, captures: Captures) -> None:
        self.captures = captures
        self._out = set[int]()
        self._captured = set[int]()

    def wanted_at_startup(self) -> list[int]:
        indices = range(len(self.captures.plan.entries))
        return [index for index in indices if index not in self._out | self._captured]

    def startup(self, progress: Progress | None = None, *, serving: bool = False) -> None:
        with self.captures.session(prepare=True) as session:
            self._capture(self.wanted_at_startup(), session, progress, serving)

    def startup_while_serving(self) -> None:
        self.startup(serving=True)

    def recapture(self, indices: Collection[int]) -> None:
        if not indices:
            return
        self._free(indices)
        with self.captures.session(prepare=True) as session:
            self._capture(indices, session, None, serving=True)

    def take_out(self, indices: Collection[int]) -> None:
        self._free(indices)
        self._out |= set(indices)

    def released(self) -> None:
        self._captured.clear()

    def left(self, used: Mapping[int, int]) -> None:
        self.released()

    def _free(self, indices: Iterable[int]) -> None:
        for graph_index in indices:
            self.captures.evict(graph_index)
            self._captured.discard(graph_index)

    def _capture(
        self,
        indices: Iterable[int],
        session: CaptureSession,
        progress: Progress | None,
        serving: bool,
    ) -> None:
        for graph_index in indices:
            outcome = self.captures.capture(graph_index, session, serving=serving)
            if outcome.record is None:
                self.captures.failed(graph_index, outcome, None)
                continue
            self._captured.add(graph_index)
            if progress is not None:
                progress(outcome.record)
