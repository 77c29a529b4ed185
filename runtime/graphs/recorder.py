"""How a graph is captured and replayed.

    warm-up run     the function runs once uncaptured, so that one-time setup is in no graph
    begin           the backend opens a capture
    run             the function runs again; its device work is recorded, not executed
    end             the backend makes a graph of what was recorded
    segments        a splitting op ends the graph, runs eagerly, and the next graph begins
    replay          the segments run in order, on the memory they were recorded on

A capture does not execute. Each graph is replayed once when it ends, so the eager call after it
finds true values, and every segment has run exactly once when the function returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from time import perf_counter
from typing import Any

from torch import Tensor

from ...errors import NestedCapture, WorkAfterSeal
from ...torch_compat.basics.tensors import tree_map_only
from ..backends.ownership import Ownership
from ..backends.protocol import Capture, Graph
from ..steps.forward_context import keep_context
from .recording import Recording, Segment, SegmentKind, eager_call, static_results
from .session import CaptureSession, capture_failure

Fn = Callable[..., Any]

ACTIVE: ContextVar[Recorder | None] = ContextVar("piecegraph_recorder", default=None)
"""The active recorder of this thread, read by splitting ops and pieces."""


def record(
    fn: Fn,
    inputs: tuple[Tensor, ...],
    session: CaptureSession,
    *,
    name: str,
    breaks: bool,
    warm_up: Fn | None = None,
) -> Recording:
    """Capture `fn(*inputs)` and execute it once; `warm_up`, if given, is called first.

    PIECEWISE if `breaks`, else FULL. Raises CaptureFailed or CaptureOutOfMemory, and what `warm_up`
    raises. After an error no graph is open or kept.
    """
    if ACTIVE.get() is not None:
        raise NestedCapture(name=name)
    if warm_up is not None:
        warm_up(*inputs)
    recorder = Recorder(session, breaks)
    memory, began = session.backend.memory, perf_counter()
    used, token = memory().used, ACTIVE.set(recorder)
    try:
        recorder.begin()
        outputs = fn(*inputs)
        recorder.end()
    except BaseException as error:
        recorder.abort()
        if isinstance(error, WorkAfterSeal) or not isinstance(error, Exception):
            raise
        raise capture_failure(error, name) from error
    finally:
        ACTIVE.reset(token)
    recording = Recording(name, recorder.segments, recorder.graphs, recorder.ownership)
    recording.outputs = recorder.weak(outputs)
    recording.seconds, recording.bytes = perf_counter() - began, memory().used - used
    session.events.emit("capture.recorded", **recording.facts())
    return recording


class Recorder:
    """One capture in progress: the segments so far and the graph that is open, if any."""

    def __init__(self, session: CaptureSession, breaks: bool) -> None:
        self.breaks = breaks
        self.segments: list[Segment] = []
        self.graphs: list[Graph] = []
        self.ownership = Ownership()
        self._session = session
        self._open: Capture | None = None
        self._in_context = keep_context(session.strict)

    def begin(self) -> None:
        """Open a graph."""
        self._open = self._session.begin(self.ownership)

    def end(self) -> None:
        """Close the open graph and replay it once. A graph without operations is no segment."""
        assert self._open is not None
        capture, self._open = self._open, None
        graph = capture.end()
        self.graphs.append(graph)  # also an empty one: it owns memory
        if graph.operations:
            graph.replay()
            self.segments.append(Segment(SegmentKind.GRAPH, [graph.replay], graph.operations))

    def splitting_op(self, name: str, fn: Fn, args: Any, kwargs: Any) -> Any:
        """End the open graph, run `fn` eagerly and keep the call, open the next graph."""
        if self._open is None:  # called by another splitting op, which is kept as a whole
            return fn(*args, **kwargs)
        self.end()
        static, targets = static_results(fn(*args, **kwargs), (args, kwargs))
        call = eager_call(name, fn, static, targets, *self.weak((args, kwargs)))
        if not self.segments or self.segments[-1].kind is SegmentKind.GRAPH:
            self.segments.append(Segment(SegmentKind.EAGER, []))
        self.segments[-1].add(call, [name] if targets else [])
        self.begin()
        return static

    def piece(self, fn: Fn, args: tuple[Any, ...]) -> Any:
        """Call a compiled piece as one operation, which reads the context of its capture."""
        if self._open is None:
            return fn(*args)
        return self._open.opaque(self._in_context(fn), args)

    def abort(self) -> None:
        """Drop the open graph and all others."""
        if self._open is not None:
            self._open.abort()
        for graph in self.graphs:
            graph.release()

    def weak(self, value: Any) -> Any:
        """`value` with weak tensors for those that graphs made; the session holds these."""

        def weaken(tensor: Tensor) -> Tensor:
            if self.ownership.is_made(tensor):
                self._session.hold(tensor)
                tensor = self._session.backend.weak(tensor)
            return tensor

        return tree_map_only(Tensor, weaken, value)
