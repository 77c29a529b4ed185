"""The graphs of a prepared model by graph index: recorded from dummy batches, used, freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...compile.ir.serialization import dtype_name
from ...compile.plan.compiled_model import CompiledModel
from ...dispatch import Dispatcher, RuntimeMode
from ...errors import CaptureFailed, DummyStepFailed, ModelChanged
from ...torch_compat.basics.tensors import writes_counted
from ..backends.protocol import GraphBackend
from ..core.code import ModelCode
from ..core.records import HostValues, Records, UnwatchedTensors
from ..parts.checks.address_checks import HostValue, MetadataAddresses
from ..parts.checks.shared_memory import named_weights
from ..tensors_by_path import tensors_by_path
from .breaks import recordable
from .dummy_batch import DummyBatches
from .installed_graph import BoundRecording, InstalledGraph, name_segments
from .recorder import record
from .recording import Recording, SegmentKind
from .session import CaptureSession, capture_failure

NOTHING_BREAKS = (
    "no splitting function was called, so attention would be inside the graph: decorate it with "
    "break_graph, or choose a graph mode without PIECEWISE"
)


class GraphSet:
    """The graphs of one prepared model; `installed[NO_GRAPH]` is None."""

    def __init__(
        self,
        code: ModelCode,
        dummies: DummyBatches,
        dispatcher: Dispatcher,
        records: Records,
        splitting_ops: Sequence[str],
        backend: GraphBackend,
    ) -> None:
        self.installed: list[InstalledGraph | None] = [None] * (len(dispatcher.plan.entries) + 1)
        self._code = code
        self._dummies = dummies
        self._dispatcher = dispatcher
        self._records = records
        self._splitting_ops = splitting_ops
        self._backend = backend
        self._unwatched: set[int] = set()
        self._recordable: tuple[CompiledModel, Callable[..., Any]] | None = None

    def record(self, graph_index: int, session: CaptureSession) -> Recording:
        """Capture a dummy batch that fills the graph's descriptor.

        Raises CaptureFailed, DummyStepFailed if the caller did not provide what ops need, and
        ModelChanged.
        """
        compiled = self._code.compiled
        entry, sizes = self._dispatcher.plan.entries[graph_index], self._dummies.sizes(graph_index)
        name = f"{entry.mode.name} {entry.descriptor.num_tokens}"
        breaks = entry.mode is RuntimeMode.PIECEWISE
        if broken := compiled.plan.broken(sizes):
            raise CaptureFailed(name=name, reason=f"it needs {broken.expression}")
        if self._recordable is None or self._recordable[0] is not compiled:
            self._recordable = compiled, recordable(compiled, self._splitting_ops)
        try:
            batch = self._dummies.batch(entry.descriptor, entry.mode, sizes)
            with self._code.captured(), batch as views:
                writes = {} if compiled.traced else _writes(compiled.model)
                modules = compiled.model.named_modules() if not compiled.traced else ()
                recording = record(
                    self._recordable[1], views, session, name=name, breaks=breaks,
                    modules={id(module): path for path, module in modules},
                )  # fmt: skip
                now = _writes(compiled.model) if writes else {}
                self._code.note_written(n for n, count in now.items() if count != writes.get(n))
                recording.metadata = self._dummies.context.metadata
        except (CaptureFailed, DummyStepFailed, ModelChanged):
            raise
        except Exception as error:
            raise capture_failure(error, name) from error
        finally:
            session.finalize()
        if breaks and not compiled.traced and not _breaks(recording):
            recording.release()
            raise CaptureFailed(name=name, reason=NOTHING_BREAKS)
        return recording

    def install(self, graph_index: int, recording: Recording) -> None:
        """Let steps use a recording."""
        inputs, addresses = self._dummies.inputs(graph_index), self._code.addresses.snapshot()
        addresses.values = self._host_values(recording)
        metadata = None
        if self._dispatcher.plan.entries[graph_index].mode is RuntimeMode.FULL:
            read = MetadataAddresses(recording.metadata, recording.ownership.found())
            metadata = read or None
            checked = addresses.addresses() | {view.data_ptr() for view in inputs.views}
            checked |= read.addresses()
            self._report_unwatched(recording, checked)
        recording.metadata = None
        if self._code.ranged:
            self._name_segments(graph_index, recording)
        compiled = self._code.compiled
        self.installed[graph_index] = InstalledGraph(
            recording,
            self._backend.install(BoundRecording(recording, inputs, compiled.plan), compiled),
            addresses,
            metadata,
            runs_python=self._backend.runs_python or _breaks(recording),
        )
        self._dispatcher.set_captured(graph_index, True)

    def remove(self, graph_index: int) -> None:
        """Free a recording, if there is one; its batches go to a lower mode."""
        graph, self.installed[graph_index] = self.installed[graph_index], None
        if graph is not None:
            self._dispatcher.set_captured(graph_index, False)
            graph.recording.release()
        if not any(self.installed):
            self._code.no_graphs()

    def recordings(self) -> list[tuple[int, Recording]]:
        """Captured graph indices with their recordings."""
        return [(index, graph.recording) for index, graph in self._present()]

    def stale(self) -> dict[int, list[str]]:
        """Graphs that read tensors which were moved or freed, and the names of these tensors."""
        moved = {index: graph.addresses.moved() for index, graph in self._present()}
        return {index: names for index, names in moved.items() if names}

    def set_ranges(self, on: bool) -> None:
        """Put what replays run into ranges for profilers, or no longer."""
        self._code.set_ranges(on)
        for graph_index, recording in self.recordings():
            if on:
                self._name_segments(graph_index, recording)
            else:
                recording.link()

    def _name_segments(self, graph_index: int, recording: Recording) -> None:
        size = self._dispatcher.plan.entries[graph_index].descriptor.num_tokens
        name_segments(recording, self._code.compiled.plan.at(size))

    def close(self) -> None:
        """Forget the code. All recordings were removed."""
        self._recordable = None

    def _host_values(self, recording: Recording) -> tuple[HostValue, ...]:
        """Tensors on the host whose value a graph has; on a CPU those that a move of the model to a
        device would leave on the host: attributes that are no buffers."""
        model = self._code.compiled.model
        attributes = {
            value.data_ptr(): f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
        on_device = not self._backend.runs_python
        names = {t.data_ptr(): n for n, t in named_weights(model)} if on_device else {}
        names |= attributes
        values = tuple(
            HostValue(
                names.get(tensor.data_ptr(), f"a {dtype_name(tensor.dtype)} tensor"), tensor, w
            )
            for tensor, w in recording.ownership.baked()
            if tensor.data_ptr() in names or on_device
        )
        if values:
            self._records.add(HostValues(recording.name, [value.name for value in values]))
        return values

    def _report_unwatched(self, recording: Recording, checked: set[int]) -> None:
        """Record once each tensor that a FULL graph reads and whose address no step checks."""
        unwatched = {
            place: tensor
            for tensor in recording.ownership.found()
            if checked.isdisjoint({tensor.data_ptr(), place := tensor.untyped_storage().data_ptr()})
            and place not in self._unwatched
        }
        if unwatched:
            self._unwatched |= set(unwatched)
            layers = tensors_by_path("layers", dict(self._dummies.context.layers))
            names = {t.untyped_storage().data_ptr(): path for path, t in layers}
            tensors = [
                f"{names.get(place, 'a tensor')}: {dtype_name(t.dtype)}{list(t.shape)}"
                for place, t in unwatched.items()
            ]
            self._records.add(UnwatchedTensors(recording.name, tensors))

    def _present(self) -> Iterator[tuple[int, InstalledGraph]]:
        for index, graph in enumerate(self.installed):
            if graph is not None:
                yield index, graph


def _writes(model: torch.nn.Module) -> Mapping[str, int]:
    """How many writes torch has counted on each weight; it counts none on inference tensors."""
    named = named_weights(model)
    return {name: writes_counted(tensor) for name, tensor in named if not tensor.is_inference()}


def _breaks(recording: Recording) -> bool:
    return any(segment.kind is SegmentKind.EAGER for segment in recording.segments)
