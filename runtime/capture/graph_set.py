"""The graphs of a prepared model by graph index: recorded from dummy batches, used, freed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from ...compile.plan.compiled_model import CompiledModel
from ...config import Config, named_ops
from ...dispatch import Dispatcher, PlanEntry, RuntimeMode
from ...errors import CaptureFailed, DummyStepFailed, ModelChanged
from ..backends.protocol import GraphBackend
from ..core.code import ModelCode
from ..tensors_by_path import tensors_by_path
from .breaks import recordable
from .dummy_batch import DummyBatches, constant_storages
from .installed_graph import BoundRecording, InstalledGraph
from .recorder import Notes, record
from .recording import Recording, SegmentKind
from .session import CaptureSession, capture_failure

NOTHING_BREAKS = (
    "no splitting function was called, so attention would be inside the graph: decorate it with "
    "break_graph, or choose a graph mode without PIECEWISE"
)


class GraphParts(Protocol):
    """What the parts of a model do about graphs; see `part.Part`."""

    def notes(self, entry: PlanEntry) -> Notes | None: ...
    def around_recording(self, entry: PlanEntry) -> AbstractContextManager[Any]: ...
    def installed(self, graph: InstalledGraph) -> None: ...
    def freed(self, graph: InstalledGraph) -> None: ...
    def failed(self, error: Exception) -> None: ...


class GraphSet:
    """The graphs of one prepared model; `installed[NO_GRAPH]` is None."""

    def __init__(
        self,
        config: Config,
        backend: GraphBackend,
        dummies: DummyBatches,
        dispatcher: Dispatcher,
        parts: GraphParts,
    ) -> None:
        self.installed: list[InstalledGraph | None] = [None] * (len(dispatcher.plan.entries) + 1)
        self._splitting_ops = named_ops(config.splitting_ops)
        self._backend = backend
        self._dummies = dummies
        self._dispatcher = dispatcher
        self._parts = parts
        self._recordable: dict[ModelCode, tuple[CompiledModel, Callable[..., Any]]] = {}

    def record(self, graph_index: int, session: CaptureSession) -> Recording:
        """Capture a dummy batch that fills the graph's descriptor.

        Raises CaptureFailed, DummyStepFailed if the caller did not provide what ops need, and
        ModelChanged.
        """
        entry, sizes = self._dispatcher.plan.entries[graph_index], self._dummies.sizes(graph_index)
        code = self._dummies.code_of(entry.descriptor)
        compiled = code.compiled
        name = f"{entry.mode.name} {entry.descriptor.num_tokens}"
        breaks = entry.mode is RuntimeMode.PIECEWISE
        if broken := compiled.plan.broken(sizes):
            raise CaptureFailed(name=name, reason=f"it needs {broken.expression}")
        if code not in self._recordable or self._recordable[code][0] is not compiled:
            self._recordable[code] = compiled, recordable(compiled, self._splitting_ops)
        try:
            batch = self._dummies.batch(entry.descriptor, entry.mode, sizes, session.agreement)
            with batch as views, self._parts.around_recording(entry):
                modules = compiled.model.named_modules() if not compiled.traced else ()
                recording = record(
                    self._recordable[code][1], views, session, name=name, breaks=breaks,
                    modules={id(module): path for path, module in modules},
                    notes=self._parts.notes(entry),
                    constant=constant_storages(compiled),
                    renew=partial(self._dummies.renew_metadata, entry.descriptor, entry.mode),
                )  # fmt: skip
                metadata = self._dummies.context.metadata
                recording.metadata = dict(tensors_by_path("metadata", metadata))
        except (CaptureFailed, DummyStepFailed, ModelChanged) as error:
            self._parts.failed(error)
            raise
        except Exception as error:
            raise self._told(capture_failure(error, name), error) from error
        finally:
            session.finalize()
        fault = compiled.plan.unstated(recording.outputs, sizes)
        if breaks and not compiled.traced and not _breaks(recording):
            fault = NOTHING_BREAKS
        if fault:
            recording.release()
            raise CaptureFailed(name=name, reason=fault)
        return recording

    def _told(self, failure: CaptureFailed, cause: Exception) -> CaptureFailed:
        """`failure`, of which the parts are told. No frame that it passes through holds it: a cycle
        would keep a dropped model alive."""
        failure.__cause__ = cause
        self._parts.failed(failure)
        return failure

    def install(self, graph_index: int, recording: Recording) -> None:
        """Let steps use a recording."""
        entry = self._dispatcher.plan.entries[graph_index]
        code, inputs = self._dummies.code_of(entry.descriptor), self._dummies.inputs(graph_index)
        graph = InstalledGraph(
            graph_index,
            entry,
            code,
            recording,
            inputs,
            self._backend.install(
                BoundRecording(recording, inputs, code.compiled.plan), code.compiled
            ),
            runs_python=self._backend.runs_python or _breaks(recording),
        )
        self._parts.installed(graph)
        recording.metadata = None
        self.installed[graph_index] = graph
        self._dispatcher.set_captured(graph_index, True)

    def remove(self, graph_index: int) -> None:
        """Free a recording, if there is one; its batches go to a lower mode."""
        graph, self.installed[graph_index] = self.installed[graph_index], None
        if graph is not None:
            self._dispatcher.set_captured(graph_index, False)
            graph.recording.release()
            self._parts.freed(graph)

    def present(self) -> list[InstalledGraph]:
        """The captured graphs."""
        return [graph for graph in self.installed if graph is not None]

    def recordings(self) -> list[tuple[int, Recording]]:
        """Captured graph indices with their recordings."""
        return [(graph.index, graph.recording) for graph in self.present()]

    def close(self) -> None:
        """Forget the code. All recordings were removed."""
        self._recordable = {}


def _breaks(recording: Recording) -> bool:
    return any(segment.kind is SegmentKind.EAGER for segment in recording.segments)
