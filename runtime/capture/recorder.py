"""How a graph is captured and replayed.

    warm-up run     the function runs once uncaptured, so that one-time setup is in no graph, and
                    the form of what each splitting op returns is known
    begin           the backend opens a capture
    run             the function runs again; its device work is recorded, not executed
    end             the backend makes a graph of what was recorded
    segments        a splitting op ends the graph, its call is kept, and the next graph begins
    replay          the segments run in order, on the memory they were recorded on

A capture executes nothing: no graph is replayed and no splitting op runs before the first step. An
engine may register memory with other devices after all captures, and a rank whose capture fails
leaves no other rank in a collective. Only a backend that emulates captures runs what the next graph
depends on, because its captures compute true values. There, and in the runs before a capture, ranks
agree before each splitting op and before each collective that none has failed: see `agreeing`. What
only the first capture of a kind runs is done once it was done on all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from operator import is_not
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

from ...compile.held_values import HeldValues
from ...compile.ir.locations import user_line
from ...errors import ArgumentWritten, NestedCapture, ReadNotKept, WorkAfterSeal
from ...torch_compat.basics.frames import calling_module
from ...torch_compat.basics.ops import OpOverload, awaited, returns_early
from ...torch_compat.basics.tensors import tree_flatten, tree_map_only, under_this_autocast
from ...torch_compat.compiling.regions import regions_noted
from ..backends.ownership import Left, MadeInBreak, Ownership
from ..backends.protocol import Capture, Graph
from ..forward_context import CURRENT, ForwardContext
from .op_log import OpLog, line_of_difference, ops_of
from .recording import (
    Recording,
    ResultForm,
    Segment,
    SegmentKind,
    as_memory,
    eager_call,
    run_calls,
)
from .session import CaptureSession, agree_before, agreeing, capture_failure

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
    modules: Mapping[int, str] = {},
    notes: Notes | None = None,
    constant: Collection[int] = (),
    renew: Callable[[], object] = lambda: None,
) -> Recording:
    """Run `fn(*inputs)` once, then capture it. `modules` are names of modules by identity,
    `constant` storages that `fn` does not write to. `renew` gives the context other metadata.

    PIECEWISE if `breaks`, else FULL. Raises CaptureFailed or CaptureOutOfMemory, and what the first
    run raises. After an error no graph is open or kept.
    """
    if ACTIVE.get() is not None:
        raise NestedCapture(name=name)
    recorder = Recorder(session, breaks, modules, notes, Ownership(constant))
    token, context = ACTIVE.set(recorder), CURRENT.get()
    metadata = HeldValues({"metadata": context and context.metadata}, depth=3)
    try:
        session.agreement.before("the run before it")
        ops = recorder.warm_up(partial(fn, *inputs))
        metadata.restore()  # a step has its own: what is derived from it is in the graph
        if ops is not None:
            recorder.choose_noting(fn, inputs, metadata.restore, ops)
        renew()  # also what is kept elsewhere, by the identity of the metadata
        recorder.see_context()
    except BaseException:
        ACTIVE.reset(token)
        raise
    before, began = session.backend.memory(), perf_counter()
    try:
        recorder.begin()
        if session.backend.runs_python:  # its captures run the model's collectives
            session.agreement.before("the capture")
        with recorder.as_on_a_device(), recorder.noted():
            outputs = as_memory(name, recorder.in_context(fn)(*inputs))
        recorder.finish()
    except BaseException as error:
        recorder.abort()
        if isinstance(error, WorkAfterSeal) or not isinstance(error, Exception):
            raise
        raise capture_failure(error, name) from error
    finally:
        ACTIVE.reset(token)
        metadata.restore()  # the next dummy batch may be given the same object
        recorder.ownership.reads = nullcontext  # no cycle: a graph holds its ownership
    recording = Recording(name, recorder.segments, recorder.graphs, recorder.ownership)
    recording.notes = notes
    recording.outputs = recorder.weak(outputs)
    now = session.backend.memory()
    recording.seconds, recording.bytes = perf_counter() - began, now.growth(before)
    recording.allocated = now.used - before.used
    session.events.emit("capture.recorded", **recording.facts())
    return recording


class Kept:
    """How what Python reads is noted without a change of what it does, of one model."""

    def __init__(self) -> None:
        self.whole = False
        """Whether objects are given as they are, and noted as a whole."""
        self.compared = set[bool]()
        """For graphs with breaks, and without: whether the operators of a run were compared."""
        self.has_regions = False
        """Whether the model compiles regions of its own, which must not be traced again."""


class Notes(Protocol):
    """Notes what Python reads of a step while a graph is captured."""

    kept: Kept

    def watch(self, context: ForwardContext) -> None:
        """Note what is read of `context`, between `open` and `close`."""

    def open(self) -> None: ...
    def close(self) -> None: ...

    def border(self, weak: Callable[[Any], Any]) -> Callable[[], None] | None:
        """What runs in each step between the breaks around the graph that was closed, of which
        Python does not run. `weak` is of `Recorder`."""

    def reads(self, addressed: set[int]) -> AbstractContextManager[Any]:
        """Entered around the recording, and the bodies of its custom ops. Adds to `addressed` the
        memory of which Python reads the address, for a kernel that is no operator."""

    def of_step(self, args: Any) -> Callable[[], Any] | None:
        """What gives the arguments of a break in each step, None if they are always `args`."""

    def finish(self) -> None:
        """The capture has ended: hold nothing of what was read."""

    def facts(self) -> dict[str, str]:
        """By path: the value, and where it was read."""


class CaptureContext:
    """The forward context of a capture, in which Python inside its graphs always runs.

    On a device such Python runs once. An emulated replay runs it with the values of the capture.
    """

    def __init__(self, context: ForwardContext, notes: Notes | None) -> None:
        self._context = ForwardContext(
            context.layers, context.metadata, context.decision, context.num_tokens
        )
        if notes is not None:
            notes.watch(self._context)

    def call(self, fn: Fn, *args: Any) -> Any:
        """`fn(*args)` in this context."""
        token = CURRENT.set(self._context)
        try:
            return fn(*args)
        finally:
            CURRENT.reset(token)


class Recorder:
    """One capture in progress: the segments so far and the graph that is open, if any."""

    def __init__(
        self,
        session: CaptureSession,
        breaks: bool,
        modules: Mapping[int, str],
        notes: Notes | None,
        ownership: Ownership,
    ) -> None:
        self.breaks = breaks
        self._module_names = modules
        self.segments: list[Segment] = []
        self.graphs: list[Graph] = []
        self.ownership = ownership
        ownership.before_collective = session.agreement.before
        ownership.reads = self.noted
        self._session = session
        self._open: Capture | None = None
        self.in_op = False
        """Whether a splitting op runs, between two graphs."""
        self._has_regions = False
        self._forms: deque[tuple[str, ResultForm]] = deque()
        """What the splitting ops of the warm-up run returned, until the capture meets the op."""
        self._notes = notes
        self._first_border: Callable[[], None] | None = None
        self._noted_run: Notes | None = None
        """What notes a run that is no capture."""
        self._context: CaptureContext | None = None
        self.see_context()

    def see_context(self) -> None:
        """Capture with the forward context as it is now."""
        if (context := CURRENT.get()) is not None:
            self._context = CaptureContext(context, self._notes)

    def warm_up(self, run: Callable[[], object]) -> OpLog | None:
        """Run what is to be captured. At the first capture of a kind, its operators."""
        notes, agreement = self._notes, self._session.agreement
        with regions_noted(self.note_region):
            if notes is None or CURRENT.get() is None or self.breaks in notes.kept.compared:
                with agreeing(agreement):
                    run()
                return None
            ops = ops_of(run, partial(agree_before, agreement))
        notes.kept.has_regions |= self._has_regions
        return None if self._has_regions else ops

    def choose_noting(
        self, fn: Fn, inputs: tuple[Tensor, ...], restore: Callable[[], None], plain: OpLog
    ) -> None:
        """Note in a way in which the same operators run as without, which are `plain`.

        Raises ReadNotKept if there is none. All ranks make as many runs: what one of them has to
        look at again is run again on all.
        """
        notes = self._notes
        assert notes is not None

        def run(call: Fn = fn) -> None:
            self._forms.clear()
            call(*inputs)
            restore()

        def on_any_rank(found: bool) -> bool:
            return bool(self._session.agreement.before("the choice of how to note", found))

        log = partial(ops_of, before=partial(agree_before, self._session.agreement))
        while True:
            self._noted_run = notes
            try:
                notes.open()
                noted = log(partial(run, self.in_context(fn)))
                notes.close()
            finally:
                self._noted_run = None
                notes.finish()
            where = line_of_difference(noted, plain, partial(log, run), on_any_rank)
            if not on_any_rank(where is not None) or (notes.kept.whole and where is None):
                break
            if notes.kept.whole:
                raise ReadNotKept(
                    where=where, reader="Python", fact="what an object is",
                    reason="while reads are noted it runs other operators than in a step",
                )  # fmt: skip
            notes.kept.whole = True
            self.see_context()
        notes.kept.compared.add(self.breaks)

    def note_region(self) -> None:
        """The warm-up run enters a region that the model compiles itself."""
        self._has_regions |= ACTIVE.get() is self  # not a region of another thread

    def as_on_a_device(self) -> AbstractContextManager[Any]:
        """Let the backend refuse what a device would, but in no model with regions that it compiles
        itself: a mode of the backend would have them compiled once more."""
        if self._has_regions:
            return nullcontext()
        return self._session.backend.recording(lambda: self._open is not None)

    def noted(self) -> AbstractContextManager[Any]:
        """Note what is read of tensors, except in a model with regions, as above."""
        if self._notes is None or self._has_regions:
            return nullcontext()
        return self._notes.reads(self.ownership.read)

    def begin(self) -> None:
        """Open a graph."""
        self._open = self._session.begin(self.ownership)
        if self._notes is not None:
            self._notes.open()

    def end(self, run: bool = False) -> None:
        """Close the open graph. One without operations is no segment. See `Capture.end`."""
        assert self._open is not None
        if self._notes is not None:
            self._notes.close()
            if (border := self._notes.border(self.weak)) is not None:
                self._add_border(border)
        capture, self._open = self._open, None
        graph = capture.end(run=run)
        self.graphs.append(graph)  # also an empty one: it owns memory
        if graph.operations:
            self.segments.append(Segment(SegmentKind.GRAPH, [graph.replay], graph.operations))

    def _add_border(self, border: Callable[[], None]) -> None:
        """Run `border` behind the last break, or before the first one."""
        if self.segments:
            calls = self.segments[-1].calls
            calls[-1] = partial(run_calls, (calls[-1], border))
        else:
            self._first_border = border

    def finish(self) -> None:
        """Close the last graph; every splitting op of the warm-up run must have been met."""
        self.end()
        if self._notes is not None:
            self._notes.finish()
        if self._forms:
            raise RuntimeError(f"{self._forms[0][0]}, called by the warm-up run, is not called")

    def splitting_op(self, name: str, fn: Fn, args: Any, kwargs: Any) -> Any:
        """End the open graph, keep the call of `fn`, open the next graph.

        In the warm-up run, call `fn` and note the form of its result.
        """
        if self.in_op:  # called by another splitting op, which is kept as a whole
            return fn(*args, **kwargs)
        if isinstance(fn, OpOverload) and returns_early(fn):
            fn = partial(awaited, fn)  # its result is copied
        if self._open is None or self._session.backend.runs_python:
            self._session.agreement.before(name)
        if self._open is None:
            leaves, spec = tree_flatten((args, kwargs))
            result = as_memory(name, self._run(partial(fn, *args, **kwargs)))
            now, its_spec = tree_flatten((args, kwargs))
            if its_spec != spec or any(map(is_not, leaves, now)):
                raise ArgumentWritten(where=user_line(), op=name)
            self._forms.append((name, ResultForm.of(result, (args, kwargs))))
            return result
        self.end(run=self._session.backend.runs_python)
        static, targets = self._form_of(name).allocate((args, kwargs))
        args, kwargs = self.weak((args, kwargs))
        of_step = self._notes.of_step((args, kwargs)) if self._notes is not None else None
        call = eager_call(name, under_this_autocast(fn), static, targets, args, kwargs, of_step)
        if self._session.backend.runs_python:
            self._run_in_capture(name, call)
        if not self.segments or self.segments[-1].kind is SegmentKind.GRAPH:
            self.segments.append(Segment(SegmentKind.EAGER, []))
        if self._first_border is not None:
            call = partial(run_calls, (self._first_border, call))
            self._first_border = None
        caller = calling_module(self._module_names)
        self.segments[-1].add(call, f"{name} {caller}".strip(), [name] if targets else [])
        self.begin()
        return static

    def _form_of(self, name: str) -> ResultForm:
        """What the same call returned in the warm-up run."""
        expected, form = self._forms.popleft() if self._forms else ("no more ops", None)
        if form is None or expected != name:
            raise RuntimeError(f"{name} is called where the warm-up run called {expected}")
        return form

    def _run(self, call: Callable[[], Any]) -> Any:
        """Run a splitting op."""
        self.in_op = True
        if self._noted_run is not None:
            self._noted_run.close()
        try:
            return call()
        finally:
            self.in_op = False
            if self._noted_run is not None:
                self._noted_run.open()

    def _run_in_capture(self, name: str, call: Callable[[], Any]) -> None:
        """Run a splitting op, and note the memory that it makes and leaves elsewhere than in its
        result: the warm-up run has made what it keeps. A mode would have regions compiled again."""
        if self._has_regions:
            self._run(call)
            return
        with MadeInBreak() as made:
            self._run(call)
        left = {id: each for id, each in made.storages.items() if not each.expired()}
        where = user_line() if left else None
        self.ownership.left |= {id: Left(each, name, where) for id, each in left.items()}

    def piece(self, fn: Fn, args: tuple[Any, ...]) -> Any:
        """Call a compiled piece as one operation, which reads the context of its capture."""
        if self._open is None:
            result = fn(*args)
            self.ownership.returned(result)
            return result
        return self._open.opaque(self.in_context(fn), args)

    def in_context(self, fn: Fn) -> Fn:
        """`fn` in the forward context of this capture, also in later replays."""
        return fn if self._context is None else partial(self._context.call, fn)

    def abort(self) -> None:
        """Drop the open graph and all others."""
        if self._notes is not None:
            self._notes.finish()
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
