"""What a prepared model has captured, by slot of its plan, and how a slot is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..compile.compiled_model import CompiledModel
from ..compile.config import TOKENS
from ..dispatch import BatchDescriptor, Dispatcher, RuntimeMode
from ..errors import CaptureFailed, DummyStepFailed
from .addresses import Addresses, Snapshot
from .backend import GraphBackend
from .capture_session import CaptureSession
from .captured_slot import CapturedSlot, WritingSlot
from .config import Config
from .dummy_step import MetadataFor, dummy_step
from .forward_context import ForwardContext
from .recordable import recordable
from .recorder import capture_failure, record
from .recording import Recording, SegmentKind
from .static_inputs import BoundInputs, StaticInputs

NOTHING_BREAKS = (
    "no splitting function was called, so attention would be inside the graph: decorate it with "
    "break_graph, or choose a graph mode without PIECEWISE"
)


class Slots:
    """Recordings in a list with the plan's slots; `captured[NO_SLOT]` is None as well.

    `stitched` runs the model without a graph and relies on the addresses of `unrecorded`.
    """

    __slots__ = (
        "_context", "_dispatcher", "_inputs", "_recordable", "_splitting_ops", "addresses",
        "captured", "compiled", "metadata_for", "stitched", "unrecorded",
    )  # fmt: skip

    compiled: CompiledModel
    stitched: Callable[..., tuple[Any, ...]]
    unrecorded: Snapshot

    def __init__(
        self,
        compiled: CompiledModel,
        config: Config,
        dispatcher: Dispatcher,
        backend: GraphBackend,
        inputs: StaticInputs,
        context: ForwardContext,
    ) -> None:
        self.captured: list[CapturedSlot | None] = [None] * (len(dispatcher.plan.entries) + 1)
        self.addresses = Addresses(backend.address)
        self.metadata_for: MetadataFor | None = None
        self._dispatcher = dispatcher
        self._inputs = inputs
        self._context = context
        self._splitting_ops = config.splitting_ops
        self.bind(compiled)

    def bind(self, compiled: CompiledModel) -> None:
        """Use and watch the weights that `compiled` is bound to; recordings stay as they are."""
        self.compiled = compiled
        self.stitched = compiled.link()
        self._recordable = recordable(compiled, self._splitting_ops)
        # code that is not traced reads the model's weights itself, any of them
        self.addresses.watch_module(compiled.model, compiled.weights if compiled.traced else None)
        self.unrecorded = self.addresses.snapshot(compiled.weights)

    def recordings(self) -> list[tuple[int, Recording]]:
        """Captured slots with their recordings."""
        return [(i, slot.recording) for i, slot in enumerate(self.captured) if slot is not None]

    def stale(self) -> dict[int, list[str]]:
        """Slots whose recording reads tensors that are elsewhere or gone, and their names."""
        return {
            slot: moved
            for slot, captured in enumerate(self.captured)
            if captured is not None and (moved := captured.addresses.moved())
        }

    def run_dummy(self, sizes: Mapping[str, int]) -> None:
        """Run the compiled code without a graph on a batch of padding."""
        with self._dummy_step(BatchDescriptor(sizes[TOKENS]), RuntimeMode.NONE):
            self.stitched(*self._inputs.at(sizes).views)

    def record(self, slot: int, session: CaptureSession) -> Recording:
        """Run and capture a dummy batch that fills the slot's descriptor.

        The run before lets the code set up what it sets up once, which a graph must not hold.
        Raises CaptureFailed, and DummyStepFailed where the caller did not give what it takes.
        """
        entry = self._dispatcher.plan.entries[slot]
        name = f"{entry.mode.name} {entry.descriptor.num_tokens}"
        breaks = entry.mode is RuntimeMode.PIECEWISE
        if broken := self.compiled.plan.broken(self._sizes_of(slot)):
            raise CaptureFailed(name=name, reason=f"it needs {broken.expression}")
        inputs = self._inputs_of(slot).views
        try:
            with self._dummy_step(entry.descriptor, entry.mode):
                self.stitched(*inputs)
                recording = record(self._recordable, inputs, session, name=name, breaks=breaks)
        except (CaptureFailed, DummyStepFailed):
            raise
        except Exception as error:
            raise capture_failure(error, name) from error
        finally:
            session.finalise()
        by_name = not self.compiled.traced or self.compiled.plan.partition_ops
        if breaks and by_name and not _breaks(recording):
            recording.release()
            raise CaptureFailed(name=name, reason=NOTHING_BREAKS)
        return recording

    def install(self, slot: int, recording: Recording) -> None:
        """Let steps use a recording."""
        inputs, addresses = self._inputs_of(slot), self.addresses.snapshot()
        kind = WritingSlot if inputs.written else CapturedSlot
        self.captured[slot] = kind(self.compiled.plan, recording, inputs, addresses)
        self._dispatcher.set_captured(slot, True)

    def remove(self, slot: int) -> None:
        """Free a recording, if there is one; its batches go to a lower mode."""
        captured, self.captured[slot] = self.captured[slot], None
        if captured is not None:
            self._dispatcher.set_captured(slot, False)
            captured.recording.release()

    @contextmanager
    def _dummy_step(self, descriptor: BatchDescriptor, mode: RuntimeMode) -> Iterator[None]:
        step = dummy_step(self._context, self.metadata_for, descriptor, mode)
        with step, torch.no_grad(), self._inputs.kept():
            yield

    def _inputs_of(self, slot: int) -> BoundInputs:
        return self._inputs.at(self._sizes_of(slot))

    def _sizes_of(self, slot: int) -> dict[str, int]:
        """The slot's size of each symbol; one that the key does not tell is at its largest."""
        descriptor = self._dispatcher.plan.entries[slot].descriptor
        sizes = dict(self._inputs.limits)
        if descriptor.num_reqs is not None and "num_reqs" in sizes:
            sizes["num_reqs"] = descriptor.num_reqs
        known = {TOKENS: descriptor.num_tokens, **dict(descriptor.axes)}
        return sizes | {n: size for n, size in known.items() if n in sizes}


def _breaks(recording: Recording) -> bool:
    return any(segment.kind is SegmentKind.EAGER for segment in recording.segments)
