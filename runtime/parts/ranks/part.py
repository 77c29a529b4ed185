"""Every rank does the same, or the rank that differs is named with what differs.

Guarantee: ranks compare all that decides a dispatch, a capture or an exchange of steps before they
capture; outcomes of captures go through the same exchange, in which a rank that fails in one, or in
a dummy run before it, says so before another waits for it in a collective. Cost: none per step.
Switch: `PIECEGRAPH_OFF=ranks`, with which each rank runs as a single process.
"""

from __future__ import annotations

from ...capture.capture_all import Progress
from ...core_model import CoreModel
from ...part import CaptureSet, Part
from .ranks import Ranks, start_facts


class RanksPart(Part):
    """Lets the ranks of one model agree before the startup set is captured."""

    name = "ranks"

    def __init__(self, core: CoreModel, ranks: Ranks) -> None:
        self._core = core
        self._ranks = ranks

    def around_capture(self, capture: CaptureSet) -> CaptureSet:
        def agree_and_capture(progress: Progress | None) -> None:
            core = self._core
            facts = start_facts(core.environment.config, core.steps.dispatcher.plan)
            for part in core.parts:
                facts |= part.alike()
            self._ranks.agree("start", facts)
            capture(progress)

        return agree_and_capture
