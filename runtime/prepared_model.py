"""A model ready to serve: dispatch a batch, run it the fastest way that is correct for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import torch

from ..errors import (
    AllCapturesFailed,
    AutocastActive,
    CaptureAfterSeal,
    ModelClosed,
    StepInProgress,
)
from ..torch_compat.basics.tensors import is_autocast_enabled
from .graphs.dummy_batch import MetadataFor
from .graphs.ledger import MemoryLedger, MemoryPlan, plan_memory
from .graphs.recording import Recording
from .graphs.warmup import (
    AuxiliaryTask,
    WarmupPlan,
    WarmupProgress,
    capture_items,
    range_tasks,
)
from .model_steps import ModelSteps
from .policy import suggested_sizes
from .ranks import start_facts
from .records import CaptureFailure, CaptureRecord, MemoryUse
from .report import build_report


class PreparedModel(ModelSteps):
    """A compiled model with its graphs. Made by `prepare`; not to be shared between threads.

    A step is `dispatch`, then `run` with metadata built for the decision's padded descriptor;
    calling the model does both. Results of a graph step are new tensors on static memory, which the
    next step overwrites: copy what must outlive the step.
    """

    def capture(
        self,
        metadata_for: MetadataFor | None = None,
        *,
        progress: Callable[[CaptureRecord], None] | None = None,
    ) -> None:
        """Capture what the strategy wants at startup; later calls capture what is still missing.

        Without `metadata_for` the function given last is used, as in every method that captures.
        `progress` is called after each capture. A capture that fails is reported, and batches of
        its size run without a graph. While the model is served uncompiled nothing is captured:
        that follows when it switches to compiled code. Raises AllCapturesFailed if there is no
        graph after it, CaptureAfterSeal, and LayerMissing or MetadataFailed if a dummy batch lacks
        what ops need.
        """
        if self._sealed:
            raise CaptureAfterSeal(name="the startup set")
        self._make_ready(metadata_for)
        if self._ranks:
            self._ranks.agree("start", start_facts(self.config, self.dispatcher.plan))
        if self._behind is not None:
            self._captures_after_switch = True
            return
        before = len(self.records.of(CaptureFailure))
        with self.events.span("capture", level=logging.INFO):
            self._capturer.startup(progress)
        failures = self.records.of(CaptureFailure)[before:]
        if failures and not self.recordings():
            raise AllCapturesFailed(count=len(failures), reason=failures[0].reason)
        self.records.add(self._memory_use())

    def warm_up(
        self,
        metadata_for: MetadataFor | None = None,
        tasks: Sequence[AuxiliaryTask] = (),
        *,
        skip: Collection[str] = (),
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Run each compiled range, capture as `capture` does, run the engine's `tasks`.

        A model that is served uncompiled has no ranges, and is captured when it switches.
        `skip` names kinds of warm-up to leave out ("range", "capture", "auxiliary"); the cost of
        that is logged. `show` is called with a line of progress for each item. Raises
        InvalidSetting for an unknown kind, and what `capture` raises.
        """
        self._make_ready(metadata_for)
        ranges, captures = [], []
        if self._behind is None:
            ranges = range_tasks(self.compiled.plan.symbols, self._graphs.run_dummy)
            captures = capture_items(self._capturer.queue, self.dispatcher.plan)
        plan = WarmupPlan(ranges, captures, tasks, skip)
        plan.run(self.capture, WarmupProgress(self.records, self.backend.memory, show))

    def memory_plan(
        self, utilization: float = 0.9, metadata_for: MetadataFor | None = None
    ) -> MemoryPlan:
        """Bytes left for the KV cache if the engine uses this share of the device.

        Before any capture, a few graphs are probed, with `metadata_for` where attention needs it,
        to forecast what all graphs take. With several ranks all must make the same call. Raises
        LayerMissing and MetadataFailed as `capture` does.
        """
        self._make_ready(metadata_for)
        self._find_form()
        graphs, margin = self._capturer.expected_bytes()
        ledger = self._stated_ledger()
        return plan_memory(self.backend.memory(), ledger, graphs, utilization, margin)

    def _make_ready(self, metadata_for: MetadataFor | None) -> None:
        """Before a capture or a warm-up: follow weights that were replaced since.

        Raises ModelClosed, and ModelMismatch for weights of another form.
        """
        self._must_be_open()
        if is_autocast_enabled():
            raise AutocastActive(action="the capture or warm-up")
        if self._graphs.unrecorded.moved():
            self._graphs.bind(self.compiled.rebound())
        if metadata_for is not None:
            self._graphs.metadata_for = metadata_for

    def capture_idle(self, budget_ms: float) -> int:
        """Capture for at most `budget_ms` what DELAYED or LAZY still want; returns how many.

        For an engine that is idle. With several ranks all must make the same call. With
        `cold="serve"` it also switches to compiled code that is ready.
        """
        if self._behind is not None:
            self._poll(self._behind)
        return 0 if self._behind is not None else self._capturer.idle(budget_ms)

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Check in steps that a long-lived tensor (KV cache, workspace) stays at its address.

        This holds for graphs captured from now on; the tensor is not kept alive. If `name` is
        watched already, it refers to this tensor from now on, and graphs that read the previous
        one raise MovedTensor until `refresh`.
        """
        self._graphs.addresses.watch(name, tensor)

    def refresh(self) -> tuple[int, ...]:
        """Follow weights that were replaced and watched names that refer to another tensor.

        Graphs that read one are captured again, also after `seal`; their indices are returned.
        Updates in place need no refresh. Raises ModelMismatch for weights of another form. With
        several ranks all must make the same call.
        """
        self._must_be_open()
        stale, moved = self._graphs.stale(), self._graphs.unrecorded.moved()
        self._graphs.bind(self.compiled.rebound())
        self.events.emit("refresh", level=logging.INFO, stale=stale, moved=moved)
        self.backend.synchronize()
        self._capturer.recapture(list(stale))
        return tuple(stale)

    def profiler_ranges(self, on: bool = True) -> None:
        """Put steps, graphs, pieces and splitting ops into named ranges for profilers, or no more.

        Without them a step pays nothing for it. Ranges are those of `torch.profiler`.
        """
        self._must_be_open()
        self._graphs.set_ranges(on)
        self.unobserve(self._ranges)
        if on:
            self.observe(self._ranges)

    def release(self) -> None:
        """Free all graphs and their memory. Steps run without; `capture` captures again."""
        if self._running:
            raise StepInProgress()
        self.backend.synchronize()
        self._last_graph = None
        for graph_index, _ in self.recordings():
            self._graphs.remove(graph_index)
        self.ledger.state_pools(dict.fromkeys(self._capturer.memory.by_mode, 0))
        self._capturer.begin()
        self._capturer.active = self._behind is not None
        self._captures_after_switch = False
        self._monitor.stop()
        self._sealed = False

    def close(self) -> None:
        """Free graphs, buffers, code and weights; steps raise ModelClosed then. Idempotent."""
        if not self._closed:
            self.events.emit("dispatch", rows=self.usage.rows(), reasons=self.usage.reasons())
            self.release()
            self._closed = True  # a thread may wait for the background
            if self._behind is not None:
                self._stop_background()
            self._behind = self._with_form = None
            self._bind = _refuse
            self._eager = self._last_graph = None
            self._context.layers = {}
            self._graphs.close()

    def report(self) -> dict[str, Any]:
        """What was prepared, captured and dispatched so far; see `runtime.report`."""
        return build_report(
            self.records,
            self.compiled.plan,
            self.resolved,
            self.usage,
            self._cache,
            self._stated_ledger(),
            suggested_sizes(self.resolved.mode, self.config, self.usage.counts),
        )

    def recordings(self) -> list[tuple[int, Recording]]:
        """Captured graph indices with their recordings."""
        return self._graphs.recordings()

    def _stated_ledger(self) -> MemoryLedger:
        """The ledger, updated with what the graphs of each mode take now."""
        self.ledger.state_pools(self._capturer.memory.by_mode)
        return self.ledger

    def _memory_use(self) -> MemoryUse:
        """Bytes that recordings took when captured; bytes in use and free bytes now."""
        taken = sum(recording.bytes for _, recording in self.recordings())
        now = self.backend.memory()
        return MemoryUse(taken, now.used, now.free)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ModelClosed()
