"""A part: what protects, proves, speeds up or operates a prepared model. The core knows no part.

A part is a folder in `runtime/parts` with a stated guarantee, cost per step and switch
(`PIECEGRAPH_OFF=<name>`). `assemble.py` alone imports parts, and states their order. A part
implements what it needs of `Part`; each method says when the core calls it. The core holds the
parts of one model as `Parts`, and what a step calls as flat tuples of it.

    class Counted(Part):
        name = "counted"

        def __init__(self) -> None:
            self.steps = 0

        def checks(self, runs: InstalledGraph | ModelCode) -> list[Check]:
            return [Check("count", self._count)]

        def _count(self, context: ForwardContext, tensors: tuple[Any, ...]) -> None:
            self.steps += 1
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

from ..dispatch import Batch, Decision, PlanEntry, RuntimeMode
from .capture.capture_all import Capturer, Progress
from .capture.captures import Captures
from .capture.installed_graph import InstalledGraph
from .capture.recorder import Notes
from .core.check import Check
from .core.code import ModelCode

Run = Callable[..., Any]
"""Runs a step: decision, positional and named inputs, metadata, and the tokens that its batch
states, if known."""

Decided = tuple[Callable[..., bool], ...]

Modes = Collection[RuntimeMode] | None
"""Runtime modes that a step allows or excludes; None by default."""

CaptureSet = Callable[[Progress | None], None]
"""Captures the startup set; is told of each capture."""


class Part:
    """One part of one prepared model. All methods are optional; here they do nothing."""

    name: ClassVar[str]
    """Its switch, and its name in `prepared.parts`."""

    offers: ClassVar[Mapping[str, str]] = {}
    """What it offers as attributes of the prepared model: their names there, and its own."""

    between_steps: bool = True
    """Whether `before_step` and `decided` are called now. After a change call `CoreModel.link`."""

    def before_step(self, batch: Batch | None) -> None:
        """Before `batch` is dispatched; None in idle time. Other code may serve from here on."""

    def decided(self, batch: Batch, decision: Decision, *modes: Modes) -> bool:
        """`batch` was dispatched, with these allowed and excluded modes. Returns whether graphs
        changed: it is then dispatched again."""
        return False

    def checks(self, runs: InstalledGraph | ModelCode) -> Sequence[Check]:
        """What each step of a graph, or of code without a graph, must satisfy.

        Asked when the graph is installed, and again when other code or weights serve.
        """
        return ()

    def around(self, run: Run) -> Run:
        """What wraps a step; `run` itself where the part is not concerned."""
        return run

    def around_capture(self, capture: CaptureSet) -> CaptureSet:
        """What wraps the capture of the startup set."""
        return capture

    def alike(self) -> Mapping[str, Any]:
        """What decides the exchanges of its steps, by name; JSON-able. All ranks must state the
        same before the startup set is captured."""
        return {}

    def around_dummy_batch(self) -> AbstractContextManager[Any] | None:
        """Entered while a dummy batch runs or is captured."""
        return None

    def make_capturer(self, captures: Captures) -> Capturer | None:
        """What decides which graphs exist; without one all are captured at startup."""
        return None

    def notes(self, entry: PlanEntry) -> Notes | None:
        """Notes what Python reads of a step while the graph of `entry` is captured."""
        return None

    def around_recording(self, entry: PlanEntry) -> AbstractContextManager[Any] | None:
        """Entered while the graph of `entry` is recorded."""
        return None

    def captured(self, graph: InstalledGraph) -> None:
        """A graph was recorded and is about to serve: note what it relies on."""

    def freed(self, graph: InstalledGraph) -> None:
        """A graph was freed."""

    def code_replaced(self, code: ModelCode) -> None:
        """Other code, or code bound to other weights, serves from now on."""

    def watched(self, name: str) -> None:
        """The engine named a tensor, or gave another one that name."""

    def moved(self, graph: InstalledGraph | None) -> list[str]:
        """Names of tensors on which `graph`, or code without a graph, relies and that are elsewhere
        now."""
        return []

    def refreshing(self) -> None:
        """Weights are about to be followed. Raises if the model is no longer the traced one."""

    def sealed(self) -> None:
        """Nothing may compile or capture from now on, outside of the strategy."""

    def released(self) -> None:
        """All graphs were freed; captures start over."""

    def failed(self, error: Exception) -> None:
        """A step or a capture raised."""

    def facts(self) -> dict[str, Any]:
        """Its entries of the report; JSON-able."""
        return {}

    def close(self) -> None:
        """The model is closed. Idempotent."""

    def forget(self) -> None:
        """Nobody uses the model any more: close it without waiting for a thread."""
        self.close()


class Parts:
    """The parts of one model in their order, by name as attributes: `prepared.parts.proof`.

    A part that is switched off is missing from the iteration; its attribute ignores all calls.
    """

    def __init__(self) -> None:
        self._parts: tuple[Part, ...] = ()
        self._kinds: Mapping[str, type[Part]] = {}

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def __getattr__(self, name: str) -> Any:
        for part in self._parts:
            if part.name == name:
                return part
        if name in self._kinds:
            return SwitchedOff(name)
        raise AttributeError(f"there is no part {name!r}; the parts are {', '.join(self._kinds)}")

    def set(self, parts: Sequence[Part], kinds: Sequence[type[Part]]) -> None:
        """Use `parts`. `kinds` are the classes of all parts, with those that are switched off."""
        self._parts = tuple(parts)
        self._kinds = {kind.name: kind for kind in kinds}

    def offered(self) -> list[str]:
        """What parts offer as attributes of the prepared model."""
        return [name for kind in self._kinds.values() for name in kind.offers]

    def offer(self, name: str) -> Any:
        """An attribute of the prepared model that a part offers."""
        for kind in self._kinds.values():
            if name in kind.offers:
                return getattr(getattr(self, kind.name), kind.offers[name])
        raise AttributeError(f"a prepared model has no {name!r}, and no part offers it")

    def between_steps(self) -> tuple[tuple[Callable[[Batch | None], None], ...], Decided]:
        """What is called before a batch is dispatched, and after it, now."""
        active = [part for part in self._parts if part.between_steps]
        before = tuple(part.before_step for part in active if _overrides(part, "before_step"))
        return before, tuple(part.decided for part in active if _overrides(part, "decided"))

    def around(self, run: Run) -> Run:
        """`run` inside what the parts put around a step, the first part outermost."""
        for part in reversed(self._parts):
            run = part.around(run)
        return run

    def checks_of(self, runs: InstalledGraph | ModelCode) -> list[tuple[Part, Check]]:
        """The checks of all parts for a graph, or for code without a graph."""
        return [(part, check) for part in self._parts for check in part.checks(runs)]

    def installed(self, graph: InstalledGraph) -> None:
        """A graph is about to serve."""
        for part in self._parts:
            part.captured(graph)
        graph.checks = tuple(check.call for _, check in self.checks_of(graph))

    def freed(self, graph: InstalledGraph) -> None:
        """A graph was freed."""
        for part in self._parts:
            part.freed(graph)

    def notes(self, entry: PlanEntry) -> Notes | None:
        """Those of the first part that takes notes."""
        notes = (part.notes(entry) for part in self._parts)
        return next((each for each in notes if each is not None), None)

    def around_dummy_batch(self) -> AbstractContextManager[Any]:
        """All that is entered while a dummy batch runs."""
        return _entered(part.around_dummy_batch() for part in self._parts)

    def around_recording(self, entry: PlanEntry) -> AbstractContextManager[Any]:
        """All that is entered while the graph of `entry` is recorded."""
        return _entered(part.around_recording(entry) for part in self._parts)

    def failed(self, error: Exception) -> None:
        """A step or a capture raised."""
        for part in self._parts:
            part.failed(error)

    def moved(self, graph: InstalledGraph | None) -> list[str] | None:
        """What `graph`, or code without a graph, relies on and is elsewhere now; None if no part
        watches it."""
        watching = [part for part in self._parts if _overrides(part, "moved")]
        names = [name for part in watching for name in part.moved(graph)]
        return names if watching else None

    def close(self) -> None:
        """Close all parts; their facts can still be read."""
        for part in reversed(self._parts):
            part.close()

    def forget(self) -> None:
        """Nobody uses the model any more: close all parts and drop them."""
        for part in reversed(self._parts):
            part.forget()
        self._parts = ()


class SwitchedOff:
    """Stands for a part that is switched off or not used, and for what it would give: it is false,
    and every call does nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> SwitchedOff:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<part {self._name}: switched off>"


@contextmanager
def _entered(contexts: Iterator[AbstractContextManager[Any] | None]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            if context is not None:
                stack.enter_context(context)
        yield


def _overrides(part: Part, method: str) -> bool:
    return getattr(type(part), method) is not getattr(Part, method)
