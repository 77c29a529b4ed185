"""What compiles or captures after `seal()` is counted, named, or an error.

Guarantee: after `seal()` no trace, compilation, autotuning or unplanned capture in a step or in the
engine's thread goes unnoticed. Cost: none per step while nothing compiles. Switch:
`PIECEGRAPH_OFF=seal`.
"""

from __future__ import annotations

from ...core_model import CoreModel
from ...part import Part
from .monitor import Monitor


class SealPart(Part):
    """Watches one model from `seal` to `release`."""

    name = "seal"

    def __init__(self, core: CoreModel) -> None:
        environment = core.environment
        self._monitor = Monitor(
            environment.config.steps.after_seal,
            environment.records,
            environment.backend,
            core.steps.context,
        )

    def sealed(self) -> None:
        self._monitor.start()

    def released(self) -> None:
        self._monitor.stop()

    def close(self) -> None:
        self._monitor.stop()
