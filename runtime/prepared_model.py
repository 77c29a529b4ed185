"""A model ready to serve: dispatch a batch, run it the fastest way that is correct for it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..cache import Cache
from ..compile.compiled_model import CompiledModel
from ..dispatch import Batch, BatchDescriptor, Decision, Dispatcher, ResolvedMode, RuntimeMode
from ..errors import (
    BatchInvalid,
    CaptureAfterSeal,
    CaptureFailed,
    CaptureOutOfMemory,
    GuardBroken,
    ModelClosed,
)
from ..events import Events
from .addresses import Addresses
from .backend import GraphBackend
from .binding import binder, packer
from .capture_session import CaptureSession
from .captured_slot import CapturedSlot
from .capturer import Capturer
from .config import Config
from .forward_context import CURRENT, ForwardContext, forward_context
from .memory_ledger import MemoryLedger, MemoryPlan, plan_memory
from .model_memory import opening_ledger, static_inputs
from .monitors import Monitor
from .ranks import Ranks, alone, start_facts
from .recorder import break_graph, opaque_piece, record
from .recording import Recording
from .report import build_report
from .results import RealResults
from .slot_actions import SlotActions
from .static_inputs import BoundInputs
from .usage import Usage
from .warmup import AuxiliaryTask, capture_items, range_works, warm_up

MetadataFor = Callable[[BatchDescriptor, RuntimeMode], Any]
"""Makes the metadata of a dummy batch that fills a descriptor; called before each capture."""


class PreparedModel:
    """A compiled model with its graphs. Made by `prepare`; not to be shared between threads.

    A step is `dispatch`, then `run` with metadata built for the decision's padded descriptor;
    calling the model does both. Results of a graph step are views of static memory: they hold
    until the next step.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        signature: inspect.Signature,
        config: Config,
        resolved: ResolvedMode,
        dispatcher: Dispatcher,
        backend: GraphBackend,
        device: torch.device,
        cache: Cache,
        layers: Mapping[str, Any],
        events: Events,
        ranks: Ranks | None = None,
        eager: Callable[..., Any] | None = None,
    ) -> None:
        self.compiled = compiled
        self.config = config
        self.resolved = resolved
        self.dispatcher = dispatcher
        self.backend = backend
        self.events = events
        self._cache = cache
        self.usage = Usage(dispatcher.plan)
        self._bind = binder(compiled.plan, signature)
        self._pack = packer(compiled.plan)
        self._eager = eager
        self._stitched = compiled.link()
        self._captured_fn = compiled.link(
            piece_hook=lambda use, piece: opaque_piece(piece),
            call_hook=lambda use, op: break_graph(op),
        )
        self._inputs = static_inputs(compiled, config, device)
        self._slots: list[CapturedSlot | None] = [None] * len(dispatcher.plan.entries)
        self._addresses = Addresses(backend.address)
        for name, weight in compiled.weights.items():
            self._addresses.watch(name, weight)
        self.ledger = opening_ledger(compiled, self._inputs, config)
        self._context = ForwardContext(layers)
        self._metadata_for: MetadataFor | None = None
        self._ranks = ranks
        self._capturer = Capturer(
            config,
            dispatcher,
            backend,
            events,
            SlotActions(self._record, self._install, self._remove),
            ranks.exchange if ranks else alone,
        )
        self._monitor = Monitor(config.after_seal, events, self._context)
        self._sealed = False
        self._closed = False

    def __call__(self, *args: Any, batch: Batch, metadata: Any = None, **kwargs: Any) -> Any:
        """Dispatch and run one step.

        `metadata` is handed to attention through the forward context: an object, or a function of
        the decision that makes one, for metadata that must be padded to the descriptor.
        """
        decision = self.dispatch(batch)
        made = metadata(decision) if callable(metadata) else metadata
        return self.run(decision, *args, metadata=made, **kwargs)

    def dispatch(self, batch: Batch) -> Decision:
        """How to run `batch`; under DELAYED and LAZY this is where graphs are captured.

        Raises BatchInvalid for a batch beyond `max_num_reqs` or with contradictory facts.
        """
        if batch.num_reqs > self.config.max_num_reqs:
            raise BatchInvalid(batch=batch, fault=f"max_num_reqs is {self.config.max_num_reqs}")
        if self._capturer.active and not self._capturer.before_step(batch):
            self.seal()
        return self.dispatcher.dispatch(batch)

    def run(self, decision: Decision, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        """Run one step as decided, on the real (unpadded) inputs.

        Raises InputMismatch, SizeOutOfRange or ArgumentFixed for wrong inputs and MovedTensor if a
        captured tensor is elsewhere.
        """
        if self._closed:
            raise ModelClosed()
        try:
            tensors, sizes = self._bind(*args, **kwargs)
        except GuardBroken:
            if self._eager is None:
                raise
            return self._run_eagerly(decision, args, kwargs, metadata)
        context = self._context
        context.metadata = metadata
        context.decision = decision
        context.num_tokens = sizes[0] if sizes else 0
        token = CURRENT.set(context)
        try:
            slot = self._slots[decision.slot] if decision.slot >= 0 else None
            if slot is None:
                with torch.no_grad():
                    results = self._stitched(*tensors)
            else:
                results = slot.replay(tensors, sizes)
        finally:
            CURRENT.reset(token)
        self.usage.count(decision, context.num_tokens)
        return self._pack(results, tensors)

    def _run_eagerly(
        self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any], metadata: Any
    ) -> Any:
        """Run the model itself: for sizes at which the compiled code would be wrong."""
        assert self._eager is not None
        context = self._context
        context.metadata, context.decision = metadata, decision
        self.events.count("eager_steps")
        with forward_context(context), torch.no_grad():
            return self._eager(*args, **kwargs)

    def capture(self, metadata_for: MetadataFor | None = None) -> None:
        """Capture what the strategy wants at startup; later calls capture what is missing of it.

        Raises CaptureAfterSeal. A capture that fails is reported and its size runs without.
        """
        if self._sealed:
            raise CaptureAfterSeal(name="the startup set")
        self._metadata_for = metadata_for
        if self._ranks:
            self._ranks.agree("start", start_facts(self.config, self.dispatcher.plan))
        with self.events.span("capture", level=logging.INFO):
            self._capturer.startup()
        self.events.emit("memory", **self._memory())

    def warm_up(
        self,
        metadata_for: MetadataFor | None = None,
        tasks: Sequence[AuxiliaryTask] = (),
        *,
        skip: Collection[str] = (),
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Run each compiled range, capture as `capture` does, run the engine's `tasks`.

        `skip` names kinds of warm-up to leave out ("range", "capture", "auxiliary"); what that
        costs is logged. `show` is given a line of progress for each item.
        """
        self._metadata_for = metadata_for
        warm_up(
            range_works(self.compiled.plan.symbols, self._run_dummy),
            capture_items(self._capturer.queue, self.dispatcher.plan),
            partial(self.capture, metadata_for),
            tasks,
            skip,
            self.backend.memory,
            self.events,
            show,
        )

    def memory_plan(self, utilisation: float = 0.9) -> MemoryPlan:
        """What is left for the KV cache if the engine uses this share of the device.

        Asked before any capture, graphs count with a forecast, for which a few are probed.
        """
        graphs = self._capturer.expected_bytes()
        return plan_memory(self.backend.memory(), self._stated_ledger(), graphs, utilisation)

    def capture_idle(self, budget_ms: float) -> int:
        """Capture for at most `budget_ms` what DELAYED or LAZY would have; returns how many.

        For an engine that has nothing to do. With several ranks all must call it, alike.
        """
        return self._capturer.idle(budget_ms)

    def seal(self) -> None:
        """From now on nothing compiles, and nothing is captured but by the strategy."""
        self._sealed = True
        self._monitor.start()
        self.events.emit("seal")

    def release(self) -> None:
        """Free all graphs and their memory; `capture` on an unsealed model brings them back."""
        for index, _ in self.recordings():
            self._remove(index)
        self._capturer.forget()
        self._monitor.stop()
        self._sealed = False

    def close(self) -> None:
        """Free everything; steps raise ModelClosed from now on. Closing twice is fine."""
        if not self._closed:
            self.events.emit("dispatch", rows=self.usage.rows(), reasons=self.usage.reasons())
            self.release()
            self._closed = True

    def report(self) -> dict[str, Any]:
        """What was prepared, captured and dispatched so far; see `runtime.report`."""
        return build_report(
            self.events,
            self.compiled.plan,
            self.resolved,
            self.usage,
            self._cache,
            self._stated_ledger(),
        )

    def recordings(self) -> list[tuple[int, Recording]]:
        """Captured slots with their recordings."""
        return [(i, slot.recording) for i, slot in enumerate(self._slots) if slot is not None]

    def _run_dummy(self, sizes: Mapping[str, int]) -> None:
        """Run the compiled code without a graph on a batch of padding."""
        descriptor = BatchDescriptor(sizes["num_tokens"])
        context = self._context
        if self._metadata_for:
            context.metadata = self._metadata_for(descriptor, RuntimeMode.NONE)
        context.num_tokens = descriptor.num_tokens
        with forward_context(context), torch.no_grad():
            self._stitched(*self._inputs.at(sizes).views)

    def _stated_ledger(self) -> MemoryLedger:
        """The ledger with what the graphs of each mode take now."""
        for mode, num_bytes in self._capturer.memory.by_mode.items():
            self.ledger.state(f"graph pool {mode.name}", num_bytes)
        return self.ledger

    def _memory(self) -> dict[str, int]:
        """Bytes the recordings took as they were made, and the device's used and free ones now."""
        taken = sum(recording.bytes for _, recording in self.recordings())
        now = self.backend.memory()
        return {"recordings": taken, "used": now.used, "free": now.free}

    def _record(self, slot: int, session: CaptureSession) -> Recording:
        """Capture a dummy batch that fills the slot's descriptor; raises CaptureFailed."""
        entry = self.dispatcher.plan.entries[slot]
        descriptor = entry.descriptor
        name = f"{entry.mode.name} {descriptor.num_tokens}"
        if broken := self.compiled.plan.broken(_sizes(descriptor)):
            raise CaptureFailed(name=name, reason=f"it needs {broken.expression}")
        inputs = self._inputs_of(slot)
        self._context.metadata = (
            self._metadata_for(descriptor, entry.mode) if self._metadata_for else None
        )
        self._context.num_tokens = descriptor.num_tokens
        with forward_context(self._context), torch.no_grad():
            try:
                self._stitched(*inputs.views)
            except torch.OutOfMemoryError as error:
                raise CaptureOutOfMemory(name=name, reason=str(error)) from error
            return record(
                self._captured_fn,
                inputs.views,
                session,
                name=name,
                breaks=entry.mode is RuntimeMode.PIECEWISE,
            )

    def _install(self, slot: int, recording: Recording) -> None:
        results = RealResults(self.compiled.plan, recording.outputs)
        addresses = self._addresses.snapshot()
        self._slots[slot] = CapturedSlot(recording, self._inputs_of(slot), results, addresses)
        self.dispatcher.set_captured(slot, True)

    def _remove(self, slot: int) -> None:
        captured, self._slots[slot] = self._slots[slot], None
        if captured is not None:
            captured.recording.release()
            self.dispatcher.set_captured(slot, False)

    def _inputs_of(self, slot: int) -> BoundInputs:
        descriptor = self.dispatcher.plan.entries[slot].descriptor
        return self._inputs.at(_sizes(descriptor))


def _sizes(descriptor: BatchDescriptor) -> dict[str, int]:
    return {"num_tokens": descriptor.num_tokens, **dict(descriptor.axes)}
