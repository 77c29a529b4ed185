"""The captured graphs of a prepared model, by graph index, and how one is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...compile.ir.config import TOKENS
from ...compile.lower.compiled_model import CompiledModel
from ...dispatch import BatchDescriptor, Dispatcher, RuntimeMode
from ...errors import CaptureFailed, DummyStepFailed
from ..backends.protocol import GraphBackend
from ..config import Config
from ..step.address_checks import Addresses, Snapshot
from ..step.forward_context import ForwardContext
from ..step.static_inputs import BoundInputs, StaticInputs
from .captured_graph import CapturedGraph, WritingGraph
from .dummy_step import MetadataFor, dummy_step
from .recordable import recordable
from .recorder import capture_failure, record
from .recording import Recording, SegmentKind
from .session import CaptureSession

NOTHING_BREAKS = (
    "no splitting function was called, so attention would be inside the graph: decorate it with "
    "break_graph, or choose a graph mode without PIECEWISE"
)


class CapturedGraphs:
    """Recordings in a list with the plan's indices; `captured[NO_GRAPH]` is None as well.

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
        self.captured: list[CapturedGraph | None] = [None] * (len(dispatcher.plan.entries) + 1)
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
        """Captured indices with their recordings."""
        return [
            (i, graph_index.recording)
            for i, graph_index in enumerate(self.captured)
            if graph_index is not None
        ]

    def stale(self) -> dict[int, list[str]]:
        """Graphs whose recording reads tensors that are elsewhere or gone, and their names."""
        return {
            graph_index: moved
            for graph_index, captured in enumerate(self.captured)
            if captured is not None and (moved := captured.addresses.moved())
        }

    def run_dummy(self, sizes: Mapping[str, int]) -> None:
        """Run the compiled code without a graph on a batch of padding."""
        with self._dummy_step(BatchDescriptor(sizes[TOKENS]), RuntimeMode.NONE):
            self.stitched(*self._inputs.at(sizes).views)

    def record(self, graph_index: int, session: CaptureSession) -> Recording:
        """Run and capture a dummy batch that fills the graph's descriptor.

        The run before lets the code set up what it sets up once, which a graph must not hold.
        Raises CaptureFailed, and DummyStepFailed where the caller did not give what it takes.
        """
        entry = self._dispatcher.plan.entries[graph_index]
        name = f"{entry.mode.name} {entry.descriptor.num_tokens}"
        breaks = entry.mode is RuntimeMode.PIECEWISE
        if broken := self.compiled.plan.broken(self._sizes_of(graph_index)):
            raise CaptureFailed(name=name, reason=f"it needs {broken.expression}")
        inputs = self._inputs_of(graph_index).views
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

    def install(self, graph_index: int, recording: Recording) -> None:
        """Let steps use a recording."""
        inputs, addresses = self._inputs_of(graph_index), self.addresses.snapshot()
        kind = WritingGraph if inputs.written else CapturedGraph
        self.captured[graph_index] = kind(self.compiled.plan, recording, inputs, addresses)
        self._dispatcher.set_captured(graph_index, True)

    def remove(self, graph_index: int) -> None:
        """Free a recording, if there is one; its batches go to a lower mode."""
        captured, self.captured[graph_index] = self.captured[graph_index], None
        if captured is not None:
            self._dispatcher.set_captured(graph_index, False)
            captured.recording.release()

    @contextmanager
    def _dummy_step(self, descriptor: BatchDescriptor, mode: RuntimeMode) -> Iterator[None]:
        step = dummy_step(self._context, self.metadata_for, descriptor, mode)
        with step, torch.no_grad(), self._inputs.kept():
            yield

    def _inputs_of(self, graph_index: int) -> BoundInputs:
        return self._inputs.at(self._sizes_of(graph_index))

    def _sizes_of(self, graph_index: int) -> dict[str, int]:
        """The graph's size of each symbol; one that the key does not tell is at its largest."""
        descriptor = self._dispatcher.plan.entries[graph_index].descriptor
        sizes = dict(self._inputs.limits)
        if descriptor.num_reqs is not None and "num_reqs" in sizes:
            sizes["num_reqs"] = descriptor.num_reqs
        known = {TOKENS: descriptor.num_tokens, **dict(descriptor.axes)}
        return sizes | {n: size for n, size in known.items() if n in sizes}


def _breaks(recording: Recording) -> bool:
    return any(segment.kind is SegmentKind.EAGER for segment in recording.segments)
