"""What compiles or captures after `seal()` is counted, named, or an error.

Guarantee: after `seal()` no trace, compilation, autotuning or unplanned capture in a step or in the
engine's thread goes unnoticed. Cost: none per step while nothing compiles. Switch:
`PIECEGRAPH_OFF=seal`.

Dynamo, Inductor and its autotuner report to torch's structured trace, which tlparse reads as well;
listening there imports neither and costs nothing while nothing compiles. Triton calls its
compilation listener. The beginning of every graph of a device, and of every capture on the model's
backend, is hooked. Work in a thread that is not the model's, or inside `allow_compilation()`, such
as the preparation of another model, is no violation.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ....config import AfterSeal
from ....errors import WorkAfterSeal
from ....torch_compat.basics.devices import graph_classes
from ....torch_compat.basics.structured_trace import listening
from ...backends.protocol import GraphBackend
from ...core.allowed_work import WorkKind, is_compilation_allowed
from ...core.records import WorkSeen
from ...core_model import CoreModel
from ...forward_context import CURRENT, ForwardContext
from ...part import Part

_SPANS = {
    "inductor_compile": WorkKind.INDUCTOR,
    "CachingAutotuner.benchmark_all_configs": WorkKind.AUTOTUNING,
    "CachingAutotuner.coordinate_descent_tuning": WorkKind.AUTOTUNING,
}
"""Spans of torch's trace by name; those that end in `_template_autotuning` are autotuning too."""


class SealPart(Part):
    """Watches the steps of one model, and all work of the thread that seals it, from `seal` to
    `release`."""

    name = "seal"

    def __init__(self, core: CoreModel) -> None:
        environment = core.environment
        self._policy = environment.config.steps.after_seal
        self._records = environment.records
        self._backend = environment.backend
        self._context = core.steps.context
        self._thread: int | None = None
        self._watching = ExitStack()

    def sealed(self) -> None:
        if self._thread is not None:
            return
        self._thread = threading.get_ident()
        self._records.events.emit("seal", after_seal=self._policy.value)
        self._watching.enter_context(listening(self._hear))
        classes = graph_classes()
        if (own := self._backend.graph_class) is None:
            self._hook(type(self._backend), "begin", self._saw_begin)
        else:
            classes.setdefault(own, f"a graph of {own.__name__}")
        for graph_class, name in classes.items():
            self._hook(graph_class, "capture_begin", partial(self._saw_graph, name))
        # Triton's settings if it is loaded: the engine's own kernels load it
        if knobs := getattr(sys.modules.get("triton"), "knobs", None):
            self._hook(knobs.compilation, "listener", self._saw_triton)

    def released(self) -> None:
        self._thread = None
        self._watching.close()  # no cycle keeps the layers alive

    def close(self) -> None:
        self.released()

    def _hook(self, owner: Any, name: str, saw: Callable[..., None]) -> None:
        self._watching.callback(_Hook(owner, name, saw).stop)

    def _hear(self, metadata: Mapping[str, Any], record: Any) -> None:
        """Find the beginning of tracing, compiling and autotuning in torch's structured trace."""
        if "dynamo_start" in metadata:
            again = metadata.get("frame_compile_id", 0) > 0
            kind = WorkKind.RECOMPILE if again else WorkKind.TRACE
            self._saw(kind, _traced(metadata["dynamo_start"].get("stack") or []))
        elif "chromium_event" in metadata:
            event = json.loads(record.payload)
            work = _SPANS.get(event["name"])
            if event["name"].endswith("_template_autotuning"):
                work = WorkKind.AUTOTUNING
            if work and event["ph"] == "B":
                self._saw(work, str(event.get("args", {}).get("kernel_name") or event["name"]))

    def _saw_triton(self, *, src: Any, cache_hit: bool, **facts: Any) -> None:
        if not cache_hit:
            self._saw(WorkKind.TRITON, f"kernel {src.name}")

    def _saw_graph(self, name: str, *args: Any, **kwargs: Any) -> None:
        self._saw(WorkKind.CAPTURE, name)

    def _saw_begin(self, backend: GraphBackend, *args: Any) -> None:
        if backend is self._backend:
            self._saw(WorkKind.CAPTURE, f"a graph on backend {backend.name}")

    def _saw(self, kind: WorkKind, detail: str) -> None:
        in_step = CURRENT.get() is self._context
        if is_compilation_allowed() or not (in_step or threading.get_ident() == self._thread):
            return
        self._records.events.count("after_seal." + kind.name.lower())
        if self._policy is AfterSeal.COUNT:
            return
        shape = _shape(self._context) if in_step else "no step"
        self._records.add(WorkSeen(kind.value, detail, shape, _callers()))
        ours = in_step or kind is WorkKind.CAPTURE
        if self._policy is AfterSeal.RAISE_ALL or (self._policy is AfterSeal.RAISE and ours):
            place = f"in a step of {shape}" if in_step else "outside of steps"
            raise WorkAfterSeal(kind=kind.value, detail=detail, place=place, where=_caller())


class _Hook:
    """Replaces `owner.name` by a function that calls `saw` and then the original, if any.

    Hooks of several models wrap one another and are stopped in any order. A stopped hook that
    others still wrap only calls the original, and is removed together with them.
    """

    def __init__(self, owner: Any, name: str, saw: Callable[..., None]) -> None:
        self._owner = owner
        self._name = name
        self._before = before = getattr(owner, name)
        self._stopped = False

        def hook(*args: Any, **kwargs: Any) -> Any:  # a function, so that it can be a method
            if not self._stopped:
                saw(*args, **kwargs)
            return before(*args, **kwargs) if before is not None else None

        hook.piecegraph_hook = self  # type: ignore[attr-defined]
        setattr(owner, name, hook)

    def stop(self) -> None:
        self._stopped = True
        while (top := self._top()) is not None and top._stopped:
            setattr(self._owner, self._name, top._before)

    def _top(self) -> _Hook | None:
        return getattr(getattr(self._owner, self._name), "piecegraph_hook", None)


def _traced(stack: list[dict[str, Any]]) -> str:
    """The function that Dynamo traces, from the stack in its record."""
    if not stack:
        return "a function"
    frame = stack[-1]
    return f"{frame.get('name')} at line {frame.get('line')}"


def _shape(context: ForwardContext) -> str:
    mode = context.decision.mode.name if context.decision else "no mode"
    return f"{context.num_tokens} tokens in {mode}"


def _frames() -> list[traceback.FrameSummary]:
    """The caller's frames without those of torch, logging and this package."""
    package = Path(__file__).parents[3]
    parts = ("runtime/", "compile/", "torch_compat/", "events.py")
    ours = tuple(f"{package}/{part}" for part in parts)
    others = ("/torch/", "/logging/", "/triton/")
    return [
        frame
        for frame in traceback.extract_stack()
        if not frame.filename.startswith(ours) and not any(o in frame.filename for o in others)
    ]


def _callers() -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in _frames()[-8:]]


def _caller() -> str | None:
    frames = _frames()
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
