"""The graphs of a prepared model: how one is captured from a dummy batch, which there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...compile.conditions.places import reader
from ...compile.ir.config import TOKENS
from ...compile.ir.serialization import dtype_name
from ...compile.plan.compiled_model import CompiledModel
from ...dispatch import BatchDescriptor, Dispatcher, RuntimeMode
from ...errors import CaptureFailed, DummyStepFailed, ModelClosed
from ...torch_compat.basics.tensors import writes_counted
from ..backends.protocol import GraphBackend
from ..config import Config
from ..records import Records, UnwatchedTensors
from ..steps.address_checks import Addresses, MetadataAddresses, Snapshot
from ..steps.binding import laid_out, lay_out
from ..steps.forward_context import ForwardContext
from ..steps.shared_memory import memory_check, named_weights
from ..steps.static_inputs import BoundInputs, StaticInputs
from .breaks import recordable
from .dummy_batch import DummyBatch, MetadataFor, model_state
from .installed_graph import CapturedGraph, WritingGraph, real_results
from .profiler_ranges import name_segments, range_hooks
from .recorder import record
from .recording import Recording, SegmentKind
from .session import CaptureSession, capture_failure

NOTHING_BREAKS = (
    "no splitting function was called, so attention would be inside the graph: decorate it with "
    "break_graph, or choose a graph mode without PIECEWISE"
)


class CapturedGraphs:
    """The graphs of one prepared model, by graph index; `captured[NO_GRAPH]` is None.

    `stitched` runs the model without a graph and relies on the addresses of `unrecorded`.
    """

    __slots__ = (
        "_context", "_dispatcher", "_inputs", "_laid_out", "_recordable", "_records",
        "_runs_python", "_seen_written", "_splitting_ops", "_unwatched", "addresses", "captured",
        "compiled", "memory_check", "metadata_for", "ranged", "stitched", "unrecorded",
    )  # fmt: skip

    compiled: CompiledModel
    stitched: Callable[..., tuple[Any, ...]]
    _recordable: Callable[..., Any] | None  # made for the first capture
    unrecorded: Snapshot

    def __init__(
        self,
        compiled: CompiledModel,
        config: Config,
        dispatcher: Dispatcher,
        backend: GraphBackend,
        inputs: StaticInputs,
        context: ForwardContext,
        records: Records,
    ) -> None:
        self._records = records
        self._runs_python = backend.runs_python
        self._unwatched: set[int] = set()
        self.captured: list[CapturedGraph | None] = [None] * (len(dispatcher.plan.entries) + 1)
        self.addresses = Addresses(backend.address)
        self.metadata_for: MetadataFor | None = None
        self.ranged = False
        self._seen_written: set[str] = set()
        self._dispatcher = dispatcher
        self._inputs = inputs
        self._context = context
        self._splitting_ops = config.splitting_ops
        self._laid_out = laid_out(compiled.plan) if compiled.traced else _any_layout
        self.bind(compiled)

    def bind(self, compiled: CompiledModel) -> None:
        """Use and watch the weights that `compiled` is bound to; recordings stay as they are."""
        self.compiled = compiled
        self.stitched = compiled.link(*(range_hooks(compiled.plan) if self.ranged else ()))
        self._recordable = None
        placed = {each.target: each.place for each in compiled.plan.weights if each.place}
        for name, place in placed.items():
            self.addresses.watch_read(name, reader(*place, compiled.model))
        # code that is not traced reads the model's weights itself, any of them
        own = {name: each for name, each in compiled.weights.items() if name not in placed}
        self.addresses.watch_module(compiled.model, own if compiled.traced else None)
        self.unrecorded = self.addresses.snapshot(compiled.weights)
        self.memory_check = memory_check(compiled, self._seen_written)

    def follow(self, before: CapturedGraphs) -> None:
        """Watch what `before` watches, and fill dummy batches in the same way."""
        self.addresses.follow(before.addresses)
        self.metadata_for = before.metadata_for
        if before.ranged:
            self.set_ranges(on=True)

    def set_ranges(self, on: bool) -> None:
        """Put what steps run into ranges for profilers, or no longer."""
        self.ranged = on
        self.bind(self.compiled)
        for _, recording in self.recordings():
            if on:
                name_segments(recording, self.compiled.plan)
            else:
                recording.link()

    def run(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run one step without a graph. Inputs of other strides than compiled code relies on are
        copied. Raises MovedTensor if a weight was moved."""
        self.unrecorded.check_step()
        if self._laid_out(*tensors):
            return self.stitched(*tensors)
        inputs = self.compiled.plan.inputs
        copies = [lay_out(item, tensor) for item, tensor in zip(inputs, tensors, strict=True)]
        results = self.stitched(*copies)
        for item, tensor, copy in zip(inputs, tensors, copies, strict=True):
            if item.written and copy is not tensor:
                tensor.copy_(copy)
        return results

    def close(self) -> None:
        """Free code, weights and buffers; only the plan is left. All recordings were removed."""
        model = torch.nn.Module()
        self.compiled = replace(self.compiled, pieces=(), weights={}, model=model)
        self.stitched = self._recordable = _closed
        self.addresses = Addresses(self.addresses.address)
        self.unrecorded = self.addresses.snapshot()
        self.metadata_for = None
        self._inputs.close()

    def recordings(self) -> list[tuple[int, Recording]]:
        """Captured graph indices with their recordings."""
        return [(index, graph.recording) for index, graph in self._present()]

    def stale(self) -> dict[int, list[str]]:
        """Graphs that read tensors which were moved or freed, and the names of these tensors."""
        moved = {index: graph.addresses.moved() for index, graph in self._present()}
        return {index: names for index, names in moved.items() if names}

    def run_dummy(self, sizes: Mapping[str, int]) -> None:
        """Run the compiled code without a graph on a dummy batch."""
        with self.dummy_batch(BatchDescriptor(sizes[TOKENS]), RuntimeMode.NONE, sizes) as views:
            self.stitched(*views)

    def run_padded(self, tensors: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """Run a step without a graph on inputs padded to the fewest tokens that the code takes.

        Returns the real rows of the results. Raises MovedTensor if a weight was moved.
        """
        self.unrecorded.check_step()
        plan = self.compiled.plan
        padded = {
            symbol.label: max(size, symbol.low)
            for symbol, size in zip(plan.symbols, sizes, strict=True)
        }
        inputs = self._inputs.at(padded)
        inputs.loader(sizes)(tensors)
        outputs = self.stitched(*inputs.views)
        if inputs.written:
            inputs.copy_back(tensors)
        results = real_results(plan, outputs, sizes)
        return tuple(result.clone() if inputs.holds(result) else result for result in results)

    def record(self, graph_index: int, session: CaptureSession) -> Recording:
        """Capture a dummy batch that fills the graph's descriptor.

        Raises CaptureFailed, and DummyStepFailed if the caller did not provide what ops need.
        """
        entry, sizes = self._dispatcher.plan.entries[graph_index], self.sizes_of(graph_index)
        name = f"{entry.mode.name} {entry.descriptor.num_tokens}"
        breaks = entry.mode is RuntimeMode.PIECEWISE
        if broken := self.compiled.plan.broken(sizes):
            raise CaptureFailed(name=name, reason=f"it needs {broken.expression}")
        if self._recordable is None:
            self._recordable = recordable(self.compiled, self._splitting_ops)
        try:
            with self.dummy_batch(entry.descriptor, entry.mode, sizes) as views:
                counted = {} if self.compiled.traced else _writes(self.compiled.model)
                recording = record(
                    self._recordable, views, session,
                    name=name, breaks=breaks, warm_up=self.stitched,
                )  # fmt: skip
                self._note_writes(counted)
                recording.metadata = self._context.metadata
        except (CaptureFailed, DummyStepFailed):
            raise
        except Exception as error:
            raise capture_failure(error, name) from error
        finally:
            session.finalize()
        by_name = not self.compiled.traced or self.compiled.plan.partition_ops
        if breaks and by_name and not _breaks(recording):
            recording.release()
            raise CaptureFailed(name=name, reason=NOTHING_BREAKS)
        return recording

    def _note_writes(self, before: Mapping[str, int]) -> None:
        """Refuse inputs that share memory with what the capture of the model's own code wrote."""
        now = _writes(self.compiled.model) if before else {}
        found = {name for name, count in now.items() if count != before.get(name)}
        if not found <= self._seen_written:
            self._seen_written |= found
            self.memory_check = memory_check(self.compiled, self._seen_written)

    def install(self, graph_index: int, recording: Recording) -> None:
        """Let steps use a recording."""
        inputs, addresses = self._inputs_of(graph_index), self.addresses.snapshot()
        kind = WritingGraph if inputs.written else CapturedGraph
        metadata = None
        if self._dispatcher.plan.entries[graph_index].mode is RuntimeMode.FULL:
            read = MetadataAddresses(recording.metadata, recording.ownership.found())
            metadata = read or None
            known = addresses.known() | {view.data_ptr() for view in inputs.views}
            self._report_unwatched(recording, known)
        recording.metadata = None
        if self.ranged:
            name_segments(recording, self.compiled.plan)
        python = self._runs_python or _breaks(recording)
        graph = kind(self.compiled.plan, recording, inputs, addresses, metadata, python)
        self.captured[graph_index] = graph
        self._dispatcher.set_captured(graph_index, True)

    def _report_unwatched(self, recording: Recording, known: set[int]) -> None:
        """Record once each tensor that a FULL graph reads and whose address no step checks."""
        found = {
            place: tensor
            for tensor in recording.ownership.found()
            if known.isdisjoint({tensor.data_ptr(), place := tensor.untyped_storage().data_ptr()})
            and place not in self._unwatched
        }
        if found:
            self._unwatched |= set(found)
            tensors = [f"{dtype_name(t.dtype)}{list(t.shape)}" for t in found.values()]
            self._records.add(UnwatchedTensors(recording.name, tensors))

    def remove(self, graph_index: int) -> None:
        """Free a recording, if there is one; its batches go to a lower mode."""
        graph, self.captured[graph_index] = self.captured[graph_index], None
        if graph is not None:
            self._dispatcher.set_captured(graph_index, False)
            graph.recording.release()

    def dummy_batch(
        self, descriptor: BatchDescriptor, mode: RuntimeMode, sizes: Mapping[str, int]
    ) -> AbstractContextManager[tuple[Tensor, ...]]:
        """The static inputs of `sizes`, with a batch of padding in the forward context."""
        batch = DummyBatch(descriptor, mode, self._inputs.at(sizes), model_state(self.compiled))
        return batch.in_context(self._context, self.metadata_for)

    def sizes_of(self, graph_index: int) -> dict[str, int]:
        """The graph's size of each symbol; the largest where the descriptor does not state one."""
        descriptor = self._dispatcher.plan.entries[graph_index].descriptor
        sizes = dict(self._inputs.limits)
        if descriptor.num_reqs is not None and "num_reqs" in sizes:
            sizes["num_reqs"] = descriptor.num_reqs
        if "num_loras" in sizes:
            sizes["num_loras"] = descriptor.lora_case
        known = {TOKENS: descriptor.num_tokens, **dict(descriptor.axes)}
        return sizes | {n: size for n, size in known.items() if n in sizes}

    def _present(self) -> Iterator[tuple[int, CapturedGraph]]:
        for index, graph in enumerate(self.captured):
            if graph is not None:
                yield index, graph

    def _inputs_of(self, graph_index: int) -> BoundInputs:
        return self._inputs.at(self.sizes_of(graph_index))


def _writes(model: torch.nn.Module) -> dict[str, int]:
    """How many writes torch has counted on each weight; it counts none on inference tensors."""
    named = named_weights(model)
    return {name: writes_counted(tensor) for name, tensor in named if not tensor.is_inference()}


def _closed(*args: Any) -> Any:
    raise ModelClosed()


def _any_layout(*tensors: Any) -> bool:
    return True


def _breaks(recording: Recording) -> bool:
    return any(segment.kind is SegmentKind.EAGER for segment in recording.segments)
