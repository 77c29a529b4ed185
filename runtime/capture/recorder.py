"""Record a function as segments: a graph, an eager call, a graph, …

One recorder serves compiled and uncompiled forwards. It opens a graph and runs the function in
it. A call made through `break_graph` closes the graph, replays it, runs eagerly and opens the
next one. Since a capture does not execute, that first replay is what computes: when the function
returns, every segment has run once, its outputs are true ones and state has advanced by one step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from time import perf_counter
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor

from ...compile.ir.writes import tensors_in
from ...errors import CaptureFailed, CaptureOutOfMemory, NestedCapture
from ...torch_compat.tensors import is_faking, tree_map_only
from ..backends.ownership import Ownership
from ..backends.protocol import Capture, Graph
from .eager_call import eager_call, static_results
from .recording import Recording, Segment, SegmentKind
from .session import CaptureSession

P = ParamSpec("P")
R = TypeVar("R")

_ACTIVE: ContextVar[Recorder | None] = ContextVar("piecegraph_recorder", default=None)


@overload
def break_graph(fn: Callable[P, R]) -> Callable[P, R]: ...
@overload
def break_graph(*, fake: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def break_graph(fn: Any = None, *, fake: Callable[..., Any] | None = None) -> Any:
    """Make `fn` a splitting function: a PIECEWISE recording runs it eagerly between two graphs.

    Outside a recording, and in a FULL one, it is a plain call. Where a model's forward is run on
    fake tensors to learn the form of its result, `fake` is called instead; without one it stands
    for a function that writes into its arguments and returns nothing.
    """
    if fn is None:
        return partial(_breaking, fake=fake)
    return _breaking(fn, fake=fake)


def _breaking(fn: Callable[P, R], fake: Callable[..., Any] | None) -> Callable[P, R]:
    name = _name(fn)

    @wraps(fn)
    def breaking(*args: P.args, **kwargs: P.kwargs) -> R:
        recorder = _ACTIVE.get()
        if recorder is not None and recorder.breaks:
            result: R = recorder.run_eagerly(name, fn, args, kwargs)
            return result
        if is_faking():
            return (fake or _write_to)(*args, **kwargs)  # type: ignore[return-value]
        return fn(*args, **kwargs)

    return breaking


def _write_to(*args: Any, **kwargs: Any) -> None:
    """What a function without a fake is taken to do with its tensors."""
    for tensor in tensors_in((args, kwargs)):
        if isinstance(tensor, FakeTensor):
            tensor.zero_()


def _name(fn: Callable[..., Any]) -> str:
    """What a report calls `fn`: an operator's full name, or a function's own."""
    while isinstance(fn, partial):
        fn = fn.func
    return str(fn) if isinstance(fn, OpOverload) else getattr(fn, "__name__", type(fn).__name__)


def opaque_piece(fn: Callable[..., R]) -> Callable[..., R]:
    """Make `fn`, a compiled piece, join a recording as its backend needs it; else a plain call."""

    @wraps(fn)
    def piece(*args: Any) -> R:
        recorder = _ACTIVE.get()
        if recorder is None:
            return fn(*args)
        result: R = recorder.run_piece(fn, args)
        return result

    return piece


def record(
    fn: Callable[..., Any],
    inputs: tuple[Tensor, ...],
    session: CaptureSession,
    *,
    name: str,
    breaks: bool,
) -> Recording:
    """Capture `fn(*inputs)` and run it once; `breaks` makes it PIECEWISE, else it is FULL.

    After an error nothing is half open and nothing is kept: `CaptureFailed` (or its
    `CaptureOutOfMemory`) says why, an interrupt passes unchanged.
    """
    if _ACTIVE.get() is not None:
        raise NestedCapture(name=name)
    recorder = Recorder(session, breaks)
    token = _ACTIVE.set(recorder)
    before, began = session.backend.memory().used, perf_counter()
    try:
        outputs = recorder.run(fn, inputs)
    except BaseException as error:
        recorder.abort()
        if not isinstance(error, Exception):
            raise
        raise capture_failure(error, name) from error
    finally:
        _ACTIVE.reset(token)
    recording = Recording(
        name,
        recorder.segments,
        recorder.graphs,
        recorder.ownership,
        outputs,
        seconds=perf_counter() - began,
        bytes=session.backend.memory().used - before,
    )
    _tell(recording, session)
    return recording


def capture_failure(error: Exception, name: str) -> CaptureFailed:
    """What to raise when `error` came up while `name` was captured."""
    kind = CaptureOutOfMemory if isinstance(error, torch.OutOfMemoryError) else CaptureFailed
    return kind(name=name, reason=f"{type(error).__name__}: {error}")


def _tell(recording: Recording, session: CaptureSession) -> None:
    session.events.emit(
        "capture.recorded",
        recording=recording.name,
        segments=len(recording.segments),
        operations=recording.operations,
        seconds=recording.seconds,
        bytes=recording.bytes,
        copied_results=sorted({op for segment in recording.segments for op in segment.copied}),
    )


class Recorder:
    """The recording in progress in one thread."""

    def __init__(self, session: CaptureSession, breaks: bool) -> None:
        self.breaks = breaks
        self.segments: list[Segment] = []
        self.graphs: list[Graph] = []
        self.ownership = Ownership()
        self._session = session
        self._capture: Capture | None = None

    def run(self, fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        """Record all of `fn`; returns its outputs, held weakly where a graph made them."""
        self._open_graph()
        outputs = fn(*inputs)
        self._close_graph()
        return self._weakly(outputs)

    def run_piece(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._capture is None:  # called by an eager op
            return fn(*args)
        return self._capture.opaque(fn, args)

    def run_eagerly(self, name: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """End the open graph, run `fn` and keep the call, open the next graph."""
        if self._capture is None:  # called by an eager op, which is kept as a whole
            return fn(*args, **kwargs)
        self._close_graph()
        static, targets = static_results(fn(*args, **kwargs), (args, kwargs))
        weak_args, weak_kwargs = self._weakly((args, kwargs))
        call = eager_call(name, fn, weak_args, weak_kwargs, static, targets)
        segment = self._eager_segment()
        segment.calls.append(call)
        segment.operations += 1
        segment.copied += [name] if targets else []
        self._open_graph()
        return static

    def abort(self) -> None:
        """Drop everything, also a capture that is open."""
        if self._capture is not None:
            self._capture.abort()
            self._capture = None
        for graph in self.graphs:
            graph.release()

    def _open_graph(self) -> None:
        self._capture = self._session.begin(self.ownership)

    def _close_graph(self) -> None:
        """End the graph and let it compute what the capture only recorded; skip an empty one."""
        assert self._capture is not None
        capture, self._capture = self._capture, None
        graph = capture.end()
        self.graphs.append(graph)
        if graph.operations:
            replay = graph.replay
            replay()
            self.segments.append(Segment(SegmentKind.GRAPH, [replay], graph.operations))

    def _eager_segment(self) -> Segment:
        """The eager segment that is last, or a new one after a graph."""
        if not self.segments or self.segments[-1].kind is SegmentKind.GRAPH:
            self.segments.append(Segment(SegmentKind.EAGER, []))
        return self.segments[-1]

    def _weakly(self, value: Any) -> Any:
        """`value` with the tensors that graphs made held by the session, no longer by us."""

        def weaken(tensor: Tensor) -> Tensor:
            if not self.ownership.is_made(tensor):
                return tensor
            self._session.hold(tensor)
            return self._session.backend.weak(tensor)

        return tree_map_only(Tensor, weaken, value)
