"""Which graphs exist: what the strategy wants, and what memory and time admit.

Guarantee: no plan, forecast or spike makes graphs exceed `steps.memory_limit`, and steps capture
within the strategy's budget alone. Cost: none per step once all graphs are captured, else a look-up
of the decision, 0.3 us (benchmarks/parts-cpu.json). Switch: `PIECEGRAPH_OFF=strategies`, with which
every graph of the plan is captured at startup.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch

from ....compile.ir.locations import handled
from ....dispatch import Batch, Decision
from ....errors import DummyStepFailed
from ....torch_compat.basics.settings import TorchState
from ...capture.captures import Captures
from ...capture.dummy_batch import MetadataFor
from ...core.arguments import checked, must_be_within
from ...core.code import ModelCode
from ...core_model import CoreModel
from ...part import CaptureSet, Modes, Part
from .capturer import StrategyCapturer
from .ledger import MemoryLedger, MemoryPlan, opening_ledger, plan_memory


class StrategiesPart(Part):
    """The captures and the device memory of one model."""

    name = "strategies"
    offers: ClassVar = {"memory_plan": "memory_plan", "capture_idle": "idle", "ledger": "ledger"}

    capturer: StrategyCapturer

    def __init__(self, core: CoreModel) -> None:
        self._core = core
        self._ledger: MemoryLedger | None = None
        self._settings = TorchState.now()
        """Of the last capture that the engine asked for; before it those of `prepare`."""

    @checked
    def idle(self, budget_ms: float) -> int:
        """Capture for at most `budget_ms` what DELAYED or LAZY still want; returns how many.

        For an engine that is idle. With several ranks all must make the same call. With
        `bundle="serve"` it also switches to compiled code that is ready.
        """
        must_be_within("capture_idle", "budget_ms", budget_ms)
        self._core.between_steps()
        captured = self.capturer.idle(budget_ms)
        self._core.link()
        return captured

    @checked
    def memory_plan(
        self, utilization: float = 0.9, metadata_for: MetadataFor | None = None
    ) -> MemoryPlan:
        """Bytes left for the KV cache if the engine uses this share of the device.

        Before any capture, a few graphs are probed, with `metadata_for` where attention needs it,
        to forecast what all graphs take, and the largest step runs twice without a graph. What a
        cold start has left in torch's cache is given back first, so that the plan is that of a warm
        one. With several ranks all must make the same call. Raises LayerMissing and MetadataFailed
        as `capture` does.
        """
        must_be_within("memory_plan", "utilization", utilization, 1.0)
        core = self._core
        core.make_ready(metadata_for)
        core.find_result_form()
        graphs, margin = self.capturer.limit.expected_bytes()
        largest_step = self._largest_step()
        memory = core.environment.backend.memory()
        return plan_memory(memory, self.ledger, graphs, utilization, margin, largest_step)

    @property
    def ledger(self) -> MemoryLedger:
        """Who owns the device's memory; the engine adds its KV cache and workspaces."""
        assert self._ledger is not None
        self._ledger.state_pools(self.capturer.memory.by_mode)
        return self._ledger

    def alike(self) -> dict[str, Any]:
        config = self._core.environment.config
        strategy = {"kind": config.strategy.kind.value, **config.strategy.model_dump()}
        return {"strategy": strategy, "memory_limit": config.steps.memory_limit}

    def around_capture(self, capture: CaptureSet) -> CaptureSet:
        self._settings = self.capturer.settings = TorchState.now()
        return capture

    def make_capturer(self, captures: Captures) -> StrategyCapturer:
        config, steps = self._core.environment.config, self._core.steps
        self.capturer = StrategyCapturer(
            config.strategy,
            config.steps.memory_limit,
            captures,
            steps.dispatcher,
            steps.usage.counts,
        )
        self.capturer.settings = self._settings
        return self.capturer

    @property
    def between_steps(self) -> bool:  # type: ignore[override]
        """Whether steps may capture."""
        return self.capturer.active

    def decided(self, batch: Batch, decision: Decision, *modes: Modes) -> bool:
        capturer = self.capturer
        self._core.steps.must_be_idle()
        idle = capturer.idle_steps.get(id(decision))
        if idle is not None and batch.num_reqs >= idle.num_reqs:
            idle.steps += 1
            return False
        changed = capturer.before_step(batch, decision, *modes)
        if not capturer.active:
            self._core.link()
            if not capturer.is_eager:
                self._core.seal()  # all is captured
        return changed

    def code_replaced(self, code: ModelCode) -> None:
        if self._ledger is None:
            self._ledger = opening_ledger(self._core.steps.codes)

    def facts(self) -> dict[str, Any]:
        return {"memory": self.ledger.rows()}

    def _largest_step(self) -> int:
        """Bytes that the largest step takes while it runs without a graph."""
        environment, dummies = self._core.environment, self._core.dummies
        try:
            return environment.backend.working_memory(dummies.run)
        except (DummyStepFailed, torch.OutOfMemoryError):
            raise
        except Exception as error:  # as of a capture: ops may lack metadata
            events = environment.records.events
            events.emit("memory.unknown_step", level=logging.WARNING, reason=handled(error))
            return 0
