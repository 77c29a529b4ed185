"""Regions that a model compiles itself with `torch.compile`.

Guarantee: what is compiled in a region during start and warm-up is counted, named, and stored in
our cache for the next start. Cost: none per step. Switch: `PIECEGRAPH_OFF=regions`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ....config import compile_config
from ...capture.capture_all import Progress
from ...core.code import ModelCode
from ...core_model import CoreModel
from ...part import CaptureSet, Part
from .regions import Regions


class RegionsPart(Part):
    """The regions of the code in service."""

    name = "regions"

    def __init__(self, core: CoreModel) -> None:
        self._environment = core.environment
        self._code: ModelCode | None = None
        self._regions: Regions | None = None

    def replaced(self, code: ModelCode) -> None:
        if code is not self._code:
            environment = self._environment
            self._code = code
            self._regions = Regions(
                code.compiled,
                compile_config(environment.config).code,
                environment.device,
                environment.cache,
                environment.records,
            )

    def around_dummy_batch(self) -> AbstractContextManager[Any] | None:
        return self._regions.compiling() if self._regions is not None else None

    def around_capture(self, capture: CaptureSet) -> CaptureSet:
        def capture_and_store(progress: Progress | None) -> None:
            try:
                capture(progress)
            finally:
                self.sealed()

        return capture_and_store

    def sealed(self) -> None:
        if self._regions is not None:
            self._regions.store()

    def close(self) -> None:
        self._regions = self._code = None
