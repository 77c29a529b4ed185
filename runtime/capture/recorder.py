"""How a graph is captured and replayed.

    warm-up run     the function runs once uncaptured, so that one-time setup is in no graph
    begin           the backend opens a capture
    run             the function runs again; its device work is recorded, not executed
    end             the backend makes a graph of what was recorded
    segments        a splitting op ends the graph, runs eagerly, and the next graph begins
    replay          the segments run in order, on the memory they were recorded on

A capture does not execute. So each graph is replayed once as soon as it ends: the eager call after
it finds true values, and when the function returns every segment has run exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor

from ...errors import NestedCapture, WorkAfterSeal
from ...torch_compat.tensors import tree_map_only
from ..backends.ownership import Ownership
from ..backends.protocol import Capture, Graph
from ..step.forward_context import CURRENT, CapturedContext, ForwardContext
from .recording import CapturedPiece, Recording, Segment, SegmentKind, eager_call, static_results
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
    keep_pieces: bool = False,
) -> Recording:
    """Capture `fn(*inputs)` and execute it once; `warm_up`, if given, is called first.

    `breaks` makes the recording PIECEWISE, otherwise it is FULL. `keep_pieces` notes the tensors
    of each piece, for steps in chunks. Raises CaptureFailed or its
    subclass CaptureOutOfMemory; an interrupt and what `warm_up` raises pass unchanged. After any
    error no capture is open and no graph is kept.
    """
    if ACTIVE.get() is not None:
        raise NestedCapture(name=name)
    if warm_up is not None:
        warm_up(*inputs)
    recorder = Recorder(session, breaks, keep_pieces)
    token = ACTIVE.set(recorder)
    used, began = session.backend.memory().used, perf_counter()
    try:
        recorder.begin()
        outputs = fn(*inputs)
        recorder.end()
        outputs = recorder.weak(outputs)
    except BaseException as error:
        recorder.abort()
        if isinstance(error, WorkAfterSeal) or not isinstance(error, Exception):
            raise
        raise capture_failure(error, name) from error
    finally:
        ACTIVE.reset(token)
    recording = Recording(name, recorder.segments, recorder.graphs, recorder.ownership)
    recording.outputs = outputs
    recording.pieces = recorder.pieces
    recording.seconds = perf_counter() - began
    recording.bytes = session.backend.memory().used - used
    session.events.emit("capture.recorded", **recording.facts())
    return recording


class Recorder:
    """One capture in progress: the segments so far and the graph that is open, if any."""

    def __init__(self, session: CaptureSession, breaks: bool, keep_pieces: bool) -> None:
        self.breaks = breaks
        self.pieces: list[CapturedPiece] = []
        self._keep_pieces = keep_pieces
        self._piece: tuple[Any, Any] | None = None
        self.segments: list[Segment] = []
        self.graphs: list[Graph] = []
        self.ownership = Ownership()
        self._session = session
        self._open: Capture | None = None
        self._context: CapturedContext | None = None
        if isinstance(context := CURRENT.get(), ForwardContext):
            self._context = CapturedContext(context, session.strict)

    def begin(self) -> None:
        """Open a graph."""
        self._open = self._session.begin(self.ownership)

    def end(self) -> None:
        """Close the open graph and replay it once. A graph without operations is no segment."""
        assert self._open is not None
        capture, self._open = self._open, None
        graph = capture.end()
        self.graphs.append(graph)  # also an empty one: it owns memory
        replay = graph.replay if graph.operations else None
        if replay is not None:
            replay()
            self.segments.append(Segment(SegmentKind.GRAPH, [replay], graph.operations))
        if self._piece is not None:
            # not held: a replay's results are read before any later segment is replayed
            args, results = tree_map_only(Tensor, self._alias, self._piece)
            self.pieces.append(CapturedPiece(replay, args, results))
            self._piece = None

    def splitting_op(self, name: str, fn: Fn, args: Any, kwargs: Any) -> Any:
        """End the open graph, run `fn` eagerly and keep the call, open the next graph."""
        if self._open is None:  # called by another splitting op, which is kept as a whole
            return fn(*args, **kwargs)
        self.end()
        static, targets = static_results(fn(*args, **kwargs), (args, kwargs))
        weak_args, weak_kwargs = self.weak((args, kwargs))
        if not self.segments or self.segments[-1].kind is SegmentKind.GRAPH:
            self.segments.append(Segment(SegmentKind.EAGER, []))
        segment = self.segments[-1]
        segment.calls.append(eager_call(name, fn, weak_args, weak_kwargs, static, targets))
        segment.operations += 1
        segment.copied += [name] if targets else []
        self.begin()
        return static

    def piece(self, fn: Fn, args: tuple[Any, ...]) -> Any:
        """Call a compiled piece as one operation, which reads the context of its capture."""
        if self._open is None:
            return fn(*args)
        given = list(args[0]) if self._keep_pieces else []  # compiled code empties its list
        if self._context is not None:
            fn = partial(self._context.call, fn)
        result = self._open.opaque(fn, args)
        if self._keep_pieces:
            self._piece = given, result
        return result

    def abort(self) -> None:
        """Drop the open graph and all others."""
        if self._open is not None:
            self._open.abort()
            self._open = None
        for graph in self.graphs:
            graph.release()

    def weak(self, value: Any) -> Any:
        """`value` with tensors that graphs made replaced by weak ones, which the session holds."""

        def weaken(tensor: Tensor) -> Tensor:
            if not self.ownership.is_made(tensor):
                return tensor
            self._session.hold(tensor)
            return self._session.backend.weak(tensor)

        return tree_map_only(Tensor, weaken, value)

    def _alias(self, tensor: Tensor) -> Tensor:
        made = self.ownership.is_made(tensor)
        return self._session.backend.weak(tensor) if made else tensor
