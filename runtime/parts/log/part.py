"""The last steps, observers of steps, and ranges for profilers.

Guarantee: each step that runs is told to each observer, with the decision that was carried out and
the error that it raised. Cost: none without observers, else the calls of each: 0.5 us of a FULL
step for one that does nothing (benchmarks/parts-cpu.json). Switch: `PIECEGRAPH_OFF=log`.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from ....dispatch import Batch, Decision, PlanEntry
from ....errors import InvalidArgument
from ...capture.installed_graph import InstalledGraph
from ...core.arguments import checked, must_be_within
from ...core.code import ModelCode
from ...core_model import CoreModel
from ...part import Modes, Part, Run
from ...tensors_by_path import tensors_by_path
from .first_steps import FirstSteps
from .profiler_ranges import StepRanges, name_segments, profiled, range_hooks
from .step_log import LoggedStep, StepLog, StepObserver


class LogPart(Part):
    """Tells observers of the steps of one model."""

    name = "log"
    offers: ClassVar = {
        "observe": "observe",
        "unobserve": "unobserve",
        "keep_steps": "keep",
        "last_steps": "last_steps",
        "step_log": "step_log",
        "profiler_ranges": "profiler_ranges",
        "profile_captures": "profile_captures",
    }

    def __init__(self, core: CoreModel) -> None:
        variants = core.environment.config.variants
        self._first_steps: FirstSteps | None = FirstSteps(variants.all_query_lens())
        self.step_log: StepLog | None = None
        """The log of the last steps, if steps are kept."""
        self._core = core
        self._observers: tuple[StepObserver, ...] = ()
        self._observing = False
        """Whether a step runs whose observers are told."""
        self._ranges = StepRanges()
        self._profiles: Path | None = None
        self.memory: dict[int, dict[range, str]] = {}
        """Of each graph captured with a profile: what lies where, by the addresses."""

    def observe(self, observer: StepObserver) -> None:
        """Tell `observer` about each step from now on.

        class Modes(piecegraph.StepObserver):
            def ended(self, decision, num_tokens, error):
                print(decision.mode.name, num_tokens)

        prepared.parts.log.observe(Modes())

        Raises InvalidArgument for what lacks a method of `StepObserver`.
        """
        for name in ("dispatched", "began", "ended"):
            if not callable(getattr(observer, name, None)):
                kind, expected = type(observer).__name__, "an object of a subclass of StepObserver"
                raise InvalidArgument(
                    call="observe",
                    name="observer",
                    value=f"a {kind}, which has no method {name}",
                    expected=expected,
                )
        self._use((*self._observers, observer))

    def unobserve(self, observer: StepObserver) -> None:
        """Stop telling `observer`. Idempotent."""
        self._use(tuple(each for each in self._observers if each is not observer))

    @checked
    def keep(self, count: int) -> None:
        """Log the last `count` steps for `last_steps`, from none on; 0 ends the log."""
        must_be_within("keep", "count", count, sys.maxsize)
        if self.step_log is not None:
            self.unobserve(self.step_log)
        self.step_log = StepLog(self._core.steps.dispatcher, count) if count else None
        if self.step_log is not None:
            self.observe(self.step_log)

    def last_steps(self) -> list[LoggedStep]:
        """The last steps, oldest first: how each ran, why, and how long. Needs `keep`."""
        return list(self.step_log.steps) if self.step_log is not None else []

    @checked
    def profiler_ranges(self, on: bool = True) -> None:
        """Put steps, graphs, pieces and splitting ops into ranges that profilers show."""
        self._core.must_be_open()
        if on == (self._ranges in self._observers):
            return
        self.unobserve(self._ranges)
        if on:
            self.observe(self._ranges)
        for code in self._core.steps.codes:
            code.link(range_hooks if on else None)
        for graph in self._core.graphs.present():
            if on:
                self.captured(graph)
            else:
                graph.recording.link()

    def profile_captures(self, folder: str | Path | None) -> None:
        """Write a trace of torch's profiler for each capture from now on into `folder`, and let
        graphs note their nodes; None ends it. Raises InvalidArgument for a folder that cannot be
        made."""
        self._profiles = folder if folder is None else Path(folder)
        self._core.environment.backend.notes_nodes = folder is not None
        try:
            if self._profiles is not None:
                self._profiles.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            expected = f"a folder to write to ({error.strerror})"
            raise InvalidArgument(
                call="capture", name="profile_dir", value=str(folder), expected=expected
            ) from error

    def around_recording(self, entry: PlanEntry) -> AbstractContextManager[Any] | None:
        return None if self._profiles is None else profiled(self._profiles, entry)

    def around(self, run: Run) -> Run:
        if not self._observers:
            return run
        observers, context = self._observers, self._core.steps.context

        def observed(
            decision: Decision, args: Any, kwargs: Any, metadata: Any, stated: int | None
        ) -> Any:
            if self._observing:  # an observer or an op calls the model
                return run(decision, args, kwargs, metadata, stated)
            raised: BaseException | None = None
            try:
                self._observing = True
                for observer in observers:
                    observer.began(decision, args, kwargs, metadata)
                return run(decision, args, kwargs, metadata, stated)
            except BaseException as error:
                raised = error
                raise
            finally:
                self._observing = False
                done = decision if raised is not None else context.decision
                for observer in reversed(observers):
                    observer.ended(done, context.num_tokens, raised)
                raised = None  # this frame is in its traceback: a cycle would keep the model alive

        return observed

    def decided(self, batch: Batch, decision: Decision, *modes: Modes) -> bool:
        for observer in () if self._observing else self._observers:
            observer.dispatched(batch, decision)
        if self._first_steps is not None and not self._core.is_provisional:
            self._look(self._first_steps, batch, decision)
        return False

    @property
    def between_steps(self) -> bool:  # type: ignore[override]
        """Whether a step is looked at, or observed."""
        return bool(self._observers) or self._first_steps is not None

    def _look(self, first_steps: FirstSteps, batch: Batch, decision: Decision) -> None:
        told = first_steps.see(batch, decision, self._core.steps.dispatcher)
        if told is not None:
            self._core.environment.records.add(told)
        if first_steps.over:
            self._first_steps = None
            self._core.link()

    def captured(self, graph: InstalledGraph) -> None:
        if self._profiles is not None:
            self.memory[graph.index] = self._memory_of(graph)
        if self._ranges in self._observers:
            size = graph.entry.descriptor.num_tokens
            name_segments(graph.recording, graph.code.compiled.plan.at(size))

    def code_replaced(self, code: ModelCode) -> None:
        if self.step_log is not None:
            self.step_log.dispatcher = self._core.steps.dispatcher
        if self._ranges in self._observers:
            for each in self._core.steps.codes:
                each.link(range_hooks)

    def _memory_of(self, graph: InstalledGraph) -> dict[range, str]:
        """Memory that the graph may read and that has a name. What the capture has made has none.
        A tensor has the first of its names: metadata may lie in what is watched. Each place is from
        where a tensor begins to the end of its memory, in which others may begin."""
        compiled, context = graph.code.compiled, self._core.steps.context
        weights = {**compiled.weights, **dict(compiled.model.named_parameters())}
        named = {
            "input": zip(compiled.plan.tensors(), graph.inputs.views, strict=False),
            "weight": (weights | dict(compiled.model.named_buffers())).items(),
            "metadata": [
                (path.removeprefix("metadata."), tensor)
                for path, tensor in (graph.recording.metadata or {}).items()
            ],
            "state": [
                *self._core.watched().items(),
                *tensors_by_path("layers", dict(context.layers)),
            ],
        }
        places: dict[range, str] = {}
        for kind, tensors in named.items():
            for name, tensor in tensors:
                memory = tensor.untyped_storage()
                place = range(tensor.data_ptr(), memory.data_ptr() + memory.nbytes())
                places.setdefault(place, f"{kind} {name}")
        return places

    def _use(self, observers: tuple[StepObserver, ...]) -> None:
        self._observers = observers
        self._core.steps.own_decisions = any(
            getattr(each, "tells_steps_apart", False) for each in observers
        )
        self._core.link()
