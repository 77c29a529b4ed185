"""Steps proved while a model serves: they run again, uncompiled, from the same state. First each
graph is proved, at its first steps, then one step in N.

Guarantee: a proved step's results, and the state that it wrote, are the uncompiled model's within a
tolerance; otherwise the engine is given these, and the largest set that shares the cause leaves
service. Cost: one count and one look-up per step, and `share` of the time. Switch:
`PIECEGRAPH_OFF=proof`; off unless `Config(shadow=...)`.

What a step may write is known: inputs that the model writes to, its own weights and buffers,
tensors in `layers`, watched tensors. Their rows are kept before the step and restored for the
second run. A write to any other memory is refused before it happens, and no further step is proved.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....compile.guards.tolerance import differences, excess
from ....compile.held_values import HeldValues
from ....compile.ir.config import TOKENS
from ....compile.ir.locations import first_line
from ....compile.ir.ops import is_custom, tensors_in, written_by
from ....config import Shadow
from ....dispatch import NO_GRAPH, Batch, BatchDescriptor, Decision, Reason, RuntimeMode
from ....errors import SetUpOnFirstUse
from ....torch_compat.basics.ops import call_kernel, is_mutable, op_name
from ....torch_compat.basics.tensors import (
    TorchDispatchMode,
    storage_id,
    tree_leaves,
    tree_map_only,
)
from ...capture.dummy_batch import model_state, preserve_rng_state
from ...capture.installed_graph import InstalledGraph
from ...core.allowed_work import allow_compilation
from ...core.code import ModelCode
from ...core.preserved import SavedMemory, StateTooLarge
from ...core.records import ShadowStopped, WrongStep
from ...core.step_file import write_steps
from ...core_model import CoreModel
from ...forward_context import ForwardContext, forward_context
from ...part import Part, Run
from ...tensors_by_path import tensors_by_path
from .coverage import Coverage
from .lockstep import Lockstep, Way

MOST_STATE = 1 << 30
"""Bytes of state that a proof may keep. Steps that write more are skipped."""

UNSTEADY = "two uncompiled runs differ"
MOST_UNSTEADY = 8
"""Such steps in the beginning, until no more are proved. An engine's warm-up may have some."""

TOO_LARGE = f"state above {MOST_STATE >> 20} MiB"
SET_UP = "the step set up state of the model"
NO_TOKENS = "no tokens on a rank"
MODEL, PADDED_MODEL, PADDED_CODE = "model", "padded model", "padded code"
"""Ways to run a step again: the model on the real rows, it or the code on padded ones. The others
are graphs by index, and NO_GRAPH."""

MOST_FILES = 8
"""Wrong steps that are saved."""

Keep = Callable[[Any, Decision], Any]


class Cause(StrEnum):
    """What is out of service after a wrong step, in order of size: the largest set that shares its
    cause."""

    NOTHING = "nothing"
    GRAPH = "graph"
    MODE = "graphs of the mode"
    GRAPHS = "all graphs"
    CODE = "compiled code"
    BUNDLE = "bundle"


class Stopped(StrEnum):
    """Why no further step is proved."""

    UNDECLARED = "an op writes to memory that is not known as state"
    RANDOM = "an op draws random numbers"
    UNSTEADY = "two uncompiled runs from the same state differ"
    FAILED = "the uncompiled model failed on the step's real rows"
    REPAIR = "the model that serves instead of wrong code is not the model as it is called"


class NotRepeatable(Exception):
    """A step cannot be run again; `reason` says why."""

    def __init__(self, reason: Stopped, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass
class _Step:
    """A step to prove: how it ran, its inputs, and the state before it."""

    decision: Decision
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    metadata: Any
    recorded: Any
    """Of the metadata, without its padding."""
    state: dict[str, Tensor]
    attributes: HeldValues
    """What Python objects held before the step."""
    before: SavedMemory
    after: SavedMemory
    waits: bool
    """Whether it is proved in idle time."""
    is_overdue: bool
    results: Any = None
    num_tokens: int = 0
    written: list[Tensor] | None = None
    """Elements of each tensor of `state` that the uncompiled model changes."""
    ranks: Lockstep | None = None


class ProofPart(Part):
    """Proves steps of one model. `uncompiled` is the model as it was given to `prepare`.

    `folder` is where wrong steps are saved; None makes one.
    """

    name = "proof"
    offers: ClassVar = {"shadow_idle": "idle", "prove_with": "prove_with"}

    def __init__(
        self, core: CoreModel, settings: Shadow, uncompiled: Run, folder: Path | None
    ) -> None:
        self.proved: Counter[tuple[str, int]] = Counter()
        self.skipped: Counter[str] = Counter()
        self.coverage = Coverage(settings)
        self._keep: Keep = _as_it_is
        self._rebuild: Keep = _as_it_is
        self._settings = settings
        self._core = core
        self._steps = core.steps
        self._exchange = core.environment.exchange
        self._records = core.environment.records
        self._uncompiled = uncompiled
        self._folder = folder
        self._stopped = False
        self._steady = False
        self._waits = False
        self._waiting: _Step | None = None
        self._changing = set[str]()
        """Attributes that a step has changed."""
        self._proved_code: Any = None

    def prove_with(self, keep: Keep, rebuild: Keep) -> None:
        """How to run a step again if metadata is padded to a step's descriptor.

        `keep(metadata, decision)` gives a copy of a step's metadata without padding, and
        `rebuild(kept, decision)` that for another decision: its descriptor states the tokens.
        Without them the metadata of a step is used as it is.
        """
        self._keep, self._rebuild = keep, rebuild

    def around(self, run: Run) -> Run:
        """`run` with a proof of the first step of each graph, and of each N-th step."""
        coverage, covered = self.coverage, self.coverage.covered

        def proving(
            decision: Decision, args: Any, kwargs: Any, metadata: Any, stated: int | None
        ) -> Any:
            coverage.left -= 1
            is_covered = getattr(decision, "graph_index", NO_GRAPH) in covered
            if (is_covered and coverage.left > 0) or self._stopped:
                return run(decision, args, kwargs, metadata, stated)
            return self._due(run, decision, args, kwargs, metadata, stated)

        return proving

    def idle(self) -> bool:
        """Prove the step that waits for it, for an engine that is idle; whether there was one.

        From the first call on, steps that are due under `Config(shadow=...)` are kept instead of
        proved at once: copies of inputs, metadata and results, and of the rows of state to which
        inputs and metadata point. Until this is called, the engine may run steps and write rows.
        It must not change weights in place, nor other state that the step has read. With several
        ranks all must make the same call.
        """
        self._core.must_be_open()
        self._waits = True
        step, self._waiting = self._waiting, None
        if step is None or self._stopped:
            return False
        state = self._state(step.args, step.kwargs)
        replaced = any(now is not step.state.get(name) for name, now in state.items())
        if not self._all_can(step.decision.graph_index, "state was replaced" if replaced else ""):
            return False
        self._timed(step)
        return True

    def stop(self, reason: Stopped, detail: str = "") -> None:
        """Prove no further step."""
        if not self._stopped:
            self._stopped, self._waiting = True, None
            self._records.add(ShadowStopped(reason.value, detail))

    def failed(self, error: Exception) -> None:
        if isinstance(error, SetUpOnFirstUse):  # both runs of a proof had the state of before
            self.proved.clear()
            for graph_index in [*self.coverage.covered]:
                self.coverage.forget(graph_index)

    def captured(self, graph: InstalledGraph) -> None:
        self.coverage.forget(graph.index)

    def code_replaced(self, code: ModelCode) -> None:
        if self._proved_code is not code.compiled.plan:
            self._proved_code = code.compiled.plan
            self.coverage.forget(NO_GRAPH)
        if self._is_model(NO_GRAPH):
            self.coverage.settle(NO_GRAPH)

    def _is_model(self, graph_index: int | None) -> bool:
        """Whether it is the model itself. Where that serves instead of wrong code it is proved."""
        serves = graph_index == NO_GRAPH and not self._steps.code.compiled.traced
        return serves and not self._records.of(WrongStep)

    def graphs(self) -> list[dict[str, Any]]:
        """How often each graph was proved, after which step the last time, or why not yet."""
        steps = self._steps.usage.by_graph()
        return self.coverage.rows(self._core.graphs.present(), steps, self._why_stopped())

    def _why_stopped(self) -> str | None:
        stopped = self._records.of(ShadowStopped)
        return f"{stopped[-1].reason}: {stopped[-1].detail}" if stopped else None

    def facts(self) -> dict[str, Any]:
        shadow = {
            "every": self._settings.every,
            "stopped": self._why_stopped(),
            "graphs": self.graphs(),
            "proved": [
                {"mode": mode, "num_tokens": size, "count": count}
                for (mode, size), count in sorted(self.proved.items())
            ],
            "wrong": [wrong.facts() for wrong in self._records.of(WrongStep)],
            "skipped": dict(self.skipped),
            "seconds": self.coverage.seconds,
            "share": self.coverage.share(),
            "overdue_seconds": self.coverage.overdue_seconds,
        }
        return {"shadow": shadow}

    def _due(
        self,
        run: Run,
        decision: Decision,
        args: Any,
        kwargs: Any,
        metadata: Any,
        stated: int | None,
    ) -> Any:
        """Run a step and prove it, or keep it until the engine is idle.

        A step that cannot be proved leaves the next one due.
        """
        step = (decision, args, kwargs, metadata, stated)
        index = getattr(decision, "graph_index", None)
        if index is None or self._is_model(index) or not self.coverage.is_turn(index):
            return run(*step)
        due, skip, failure = None, "", ""
        began, is_overdue = perf_counter(), self.coverage.is_overdue(index)
        if not is_overdue and (self._waiting is not None or not self.coverage.has_time()):
            skip = "waiting" if self._waiting else "budget"
        else:
            try:
                due = self._kept(decision, args, kwargs, metadata, is_overdue)
            except StateTooLarge:
                skip = TOO_LARGE
            except Exception as error:
                failure = f"{type(error).__name__}: {first_line(error)}"
        self.coverage.spend(perf_counter() - began, is_overdue)
        results = run(*step)
        num_tokens = self._steps.context.num_tokens
        skip = skip or ("" if num_tokens else NO_TOKENS)
        if due is not None and (set_up := set(due.attributes.changed()) - self._changing):
            self._changing |= set_up
            skip = SET_UP  # the second run would find it set up
        if not self._all_can(index, skip, failure) or due is None:
            return results
        due.results, due.num_tokens = results, num_tokens
        due.decision = self._steps.context.decision
        due.after = due.before.now()
        if due.waits:
            due.results = _copied(due.results)
            self._waiting = due
            return due.results
        return self._timed(due)

    def _held(self) -> HeldValues:
        """Attributes of the model and the layers."""
        layers = self._steps.context.layers.items()
        modules = dict(self._steps.code.compiled.model.named_modules())
        return HeldValues(modules | {f"layers[{name!r}]": each for name, each in layers})

    def _all_can(self, graph_index: int, skip: str, failure: str = "") -> bool:
        """Whether all ranks can prove this step; else why not, or why no further step, is noted."""
        stated = self._exchange("step to prove", {"skip": skip, "failure": failure})
        for reason in filter(None, (one["failure"] for one in stated)):
            self.stop(Stopped.FAILED, reason)
            return False
        for reason in filter(None, (one["skip"] for one in stated)):
            self._skip(graph_index, reason)
            if reason == TOO_LARGE:
                self.coverage.settle(graph_index)
            elif reason == SET_UP:
                self.coverage.left = 1
            return False
        return True

    def _skip(self, graph_index: int, why: str) -> None:
        self.skipped[why] += 1
        self.coverage.skip(graph_index, why)

    def _kept(
        self, decision: Decision, args: Any, kwargs: Any, metadata: Any, is_overdue: bool
    ) -> _Step:
        recorded, waits = self._keep(metadata, decision), self._waits and not is_overdue
        if waits:
            args, kwargs = _copied((args, dict(kwargs)))
            recorded = copy.deepcopy(recorded)
        pointers = tensors_in((args, kwargs))
        pointers += [tensor for _, tensor in tensors_by_path("metadata", metadata)]
        state = self._state(args, kwargs)
        before = SavedMemory(list(state.values()), pointers, most=MOST_STATE)
        held = self._held()
        return _Step(
            decision,
            args,
            kwargs,
            metadata,
            recorded,
            state,
            held,
            before,
            before,
            waits,
            is_overdue,
        )

    def _state(self, args: Any, kwargs: Any) -> dict[str, Tensor]:
        """What a step may write, by name: each memory once."""
        compiled, context = self._steps.code.compiled, self._steps.context
        written = [item.written for item in compiled.plan.inputs]
        inputs = tensors_in((args, kwargs))
        named = {
            **{f"state {n}": each for n, each in enumerate(model_state(compiled).values())},
            **dict(tensors_by_path("layers", context.layers)),
            **self._core.watched(),
        }
        if any(written):
            named |= {f"input {n}": tensor for n, tensor in enumerate(inputs)}
        each_once = {storage_id(tensor): (name, tensor) for name, tensor in named.items()}
        return dict(each_once.values())

    def _timed(self, step: _Step) -> Any:
        began, synchronize = perf_counter(), self._core.environment.backend.synchronize
        with_grad = torch.is_grad_enabled()
        synchronize()  # a copy to metadata that is rebuilt may still have to read its source
        try:
            with allow_compilation(), torch.no_grad(), preserve_rng_state():
                return self._proved(step)
        finally:
            synchronize()
            torch.set_grad_enabled(with_grad)
            self.coverage.spend(perf_counter() - began, step.is_overdue)

    def _proved(self, step: _Step) -> Any:
        """The step's results, or those of the uncompiled model if they are others.

        All ranks take out of service what the largest cause on any of them says.
        """
        results, right = _copied(step.results), step.results
        final = now = step.after.now() if step.waits else step.after
        step.ranks = Lockstep(self._exchange, lambda way: self._run_alone(step, way, step.before))
        verdict: dict[str, Any] = {"stop": None, "unsteady": False, "wrong": None}
        try:
            expected = self._again(step)
            got = self._compared(step, results, step.before, step.after)
            if not self._steady:
                self._steady = not bool(differences(expected, self._again(step)).any())
                verdict["unsteady"] = not self._steady
            wrong = excess(expected, got, lambda: self._again(step)) if self._steady else None
            if wrong is not None:
                cause, graphs = self._cause(step, expected)
                apart = wrong.difference if isfinite(wrong.difference) else None
                verdict["wrong"] = [list(Cause).index(cause), graphs, apart, wrong.tolerance]
                if not step.waits:  # later steps have built on what it wrote
                    now.restore()
                    right, _, final = self._run(step, MODEL, repairs=True)
        except NotRepeatable as error:
            verdict["stop"] = [error.reason, error.detail]
        except Exception as error:
            verdict["stop"] = [Stopped.FAILED, f"{type(error).__name__}: {first_line(error)}"]
        try:
            verdicts = step.ranks.finish(verdict)
        finally:
            final.restore()
        self._conclude(step, verdicts, verdict["wrong"] is not None)
        return right

    def _conclude(self, step: _Step, verdicts: Sequence[Any], is_wrong: bool) -> None:
        """Do what the verdicts of all ranks say; the step is saved where it `is_wrong`."""
        for reason, detail in filter(None, (one["stop"] for one in verdicts)):
            self.stop(Stopped(reason), detail)
            return
        if any(one["unsteady"] for one in verdicts):
            self._skip(step.decision.graph_index, UNSTEADY)
            if self.skipped[UNSTEADY] == MOST_UNSTEADY:
                self.stop(Stopped.UNSTEADY)
            return
        decision = step.decision
        self.proved[decision.mode.name, decision.descriptor.num_tokens] += 1
        self.coverage.prove(decision.graph_index, sum(self._steps.usage.by_graph().values()))
        repaired = decision.graph_index == NO_GRAPH and not self._steps.code.compiled.traced
        wrong = [one["wrong"] for one in verdicts if one["wrong"]]
        if wrong:
            cause, _, apart, tolerance = max(wrong, key=itemgetter(0))
            graphs = sorted({graph for _, graphs, *_ in wrong for graph in graphs})
            self._book(step, apart, tolerance, list(Cause)[cause], graphs, is_wrong)
            if repaired:
                self.stop(Stopped.REPAIR, f"a step of {step.num_tokens} tokens")

    def _again(self, step: _Step) -> Any:
        """The uncompiled model on the real rows."""
        return self._compared(step, *self._run(step, MODEL))

    def _run(
        self, step: _Step, way: Way, start: SavedMemory | None = None, repairs: bool = False
    ) -> tuple[Any, SavedMemory, SavedMemory]:
        """What a run gives from a state, that before the step unless one is given, and the state
        around it. Other ranks make the same run. Python objects hold afterwards what they held
        before, unless the run repairs."""
        assert step.ranks is not None
        held = self._held()
        try:
            return step.ranks.run(  # type: ignore[no-any-return]
                way, lambda way: self._run_alone(step, way, start or step.before)
            )
        finally:
            if not repairs:
                held.restore()

    def _run_alone(
        self, step: _Step, way: Way, start: SavedMemory
    ) -> tuple[Any, SavedMemory, SavedMemory]:
        decision, run = self._way(step, way)
        start.restore()
        step.attributes.restore()
        same = decision.descriptor == step.decision.descriptor and not step.waits
        metadata = step.metadata if same else self._rebuild(step.recorded, decision)
        before = step.before.now()  # with the metadata of this decision
        results = _copied(run(metadata))
        return results, before, step.before.now()

    def _way(self, step: _Step, way: Way) -> tuple[Decision, Run]:
        """The decision of a run, and the run, which takes metadata."""
        if way == MODEL:
            decision, known = _without_graph(step.num_tokens), [*step.state.values()]

            def model(metadata: Any) -> Any:
                with self._context(step, decision, metadata), _Declared(known):
                    return self._uncompiled(*step.args, **step.kwargs)

            return decision, model
        if way in (PADDED_CODE, PADDED_MODEL):
            sizes = self._padded_sizes(step.decision)
            args, kwargs = step.args, dict(step.kwargs)
            code, uncompiled = self._steps.padded_runs(sizes, args, kwargs, self._uncompiled)

            def padded(metadata: Any) -> Any:
                with self._context(step, step.decision, metadata):
                    return (code if way == PADDED_CODE else uncompiled)()

            return step.decision, padded
        assert isinstance(way, int)
        decision = _without_graph(step.num_tokens) if way == NO_GRAPH else self._on_graph(way)

        def decided(metadata: Any) -> Any:
            return self._steps.run(decision, step.args, dict(step.kwargs), metadata, None)

        return decision, decided

    def _compared(self, step: _Step, results: Any, before: SavedMemory, after: SavedMemory) -> Any:
        """What is compared of two runs: the results, the written state, and whether a run wrote
        elsewhere. The first run that is compared is the uncompiled model's; it says what the
        written state is."""
        changed = before.changed(after)
        step.written = step.written or changed
        elsewhere = _but(changed, step.written)
        for start in (step.before, after):  # what is written may be what was there in one of them
            if any(map(torch.any, elsewhere)):
                _, unpadded, padded = self._run(step, PADDED_MODEL, start)
                elsewhere = _but(elsewhere, unpadded.changed(padded))
        return results, after.rows_of(step.written), any(map(torch.any, elsewhere))

    def _cause(self, step: _Step, expected: Any) -> tuple[Cause, list[int]]:
        """What shares the cause of a wrong step, by running it in lower modes."""
        decision, mode, captured = step.decision, step.decision.mode, self._graphs()
        every = [index for index, _, _ in captured]
        if not self._right(step, NO_GRAPH, expected):
            return (Cause.CODE if self._steps.code.compiled.traced else Cause.NOTHING), every
        if mode is RuntimeMode.NONE:
            return Cause.NOTHING, []  # wrong once
        if decision.descriptor.num_tokens != step.num_tokens:
            if not self._right(step, PADDED_MODEL, expected):
                return Cause.GRAPHS, every  # padding reaches real rows
            if not self._right(step, PADDED_CODE, expected):
                return Cause.CODE, every
        padded = self._padded_sizes(decision)
        for index, other, sizes in captured:
            lower = mode is RuntimeMode.FULL and other is RuntimeMode.PIECEWISE and sizes == padded
            if lower and not self._right(step, index, expected):
                return Cause.GRAPHS, every
        rebuilt = step.metadata is None or self._rebuild is not _as_it_is
        for index, other, sizes in captured:
            another = other is mode and index != decision.graph_index
            fits = sizes[TOKENS] >= step.num_tokens
            if rebuilt and another and fits and self._right(step, index, expected):
                return Cause.GRAPH, [decision.graph_index]
        return Cause.MODE, [index for index, other, _ in captured if other is mode]

    def _on_graph(self, index: int) -> Decision:
        entry = self._steps.dispatcher.plan.entries[index]
        return Decision(entry.mode, entry.descriptor, index, Reason.EXCLUDED)

    def _padded_sizes(self, decision: Decision) -> Mapping[str, int]:
        """Of the step's graph; empty if it ran without one."""
        return next((sizes for i, _, sizes in self._graphs() if i == decision.graph_index), {})

    def _graphs(self) -> list[tuple[int, RuntimeMode, Mapping[str, int]]]:
        """Index, mode and sizes of each captured graph."""
        sizes = self._core.dummies.sizes
        return [
            (graph.index, graph.entry.mode, sizes(graph.index))
            for graph in self._core.graphs.present()
        ]

    def _context(
        self, step: _Step, decision: Decision, metadata: Any
    ) -> AbstractContextManager[ForwardContext]:
        layers = self._steps.context.layers
        return forward_context(ForwardContext(layers, metadata, decision, step.num_tokens))

    def _right(self, step: _Step, way: Way, expected: Any) -> bool:
        """Whether a run from the state before the step does the same; what raises does not."""
        try:
            results, before, after = self._run(step, way)
            got = self._compared(step, _real_rows(results, expected[0]), before, after)
            return excess(expected, got, lambda: self._again(step)) is None
        except Exception:
            return False

    def _book(
        self,
        step: _Step,
        apart: float | None,
        tolerance: float,
        cause: Cause,
        graphs: list[int],
        is_wrong: bool,
    ) -> None:
        decision = step.decision
        entries = self._steps.dispatcher.plan.entries
        names = [f"{entries[i].mode.name} {entries[i].descriptor.num_tokens}" for i in graphs]
        file = self._saved(step) if is_wrong else None
        by = "by another result" if apart is None else f"by {apart:.3g} > {tolerance:.3g}"
        reason = f"a step of {step.num_tokens} tokens differs {by}"
        out = self._take_out(cause, graphs, reason)
        self._records.add(
            WrongStep(
                decision.mode.name, step.num_tokens, decision.descriptor.num_tokens,
                decision.graph_index, apart, tolerance, out.value,
                names, str(file) if file else None,
            )
        )  # fmt: skip

    def _take_out(self, cause: Cause, graphs: Collection[int], reason: str) -> Cause:
        """Use graphs no more, or compiled code; returns what is out of service.

        A bundle in the private directory is put aside, so that no other start takes it.
        """
        if cause is Cause.CODE and self._core.request is not None:
            return Cause.BUNDLE if self._core.leave_code(reason) else Cause.CODE
        self._core.environment.backend.synchronize()
        self._steps.forget_results()
        self._core.capturer.take_out(graphs)
        self._core.link()
        return cause

    def _saved(self, step: _Step) -> Path | None:
        """The step in a file, from the state before it."""
        number = len(self._records.of(WrongStep))
        if number >= MOST_FILES:
            return None
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="piecegraph-shadow-"))
        file = self._folder / f"step-{number}.pt"
        state = dict(zip(step.state, step.before.contents(), strict=True))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            row = (step.args, step.kwargs, _batch(step), step.recorded)
            write_steps(file, [row], state)
        except Exception as error:  # metadata that pickle refuses, a full disk
            self._records.events.emit("shadow.not_saved", reason=first_line(error))
            return None
        return file


class _Declared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises NotRepeatable before an operator writes to memory that is neither made inside nor
    `known`, or draws random numbers. It sees operators inside Python ops, too."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._may_write = set(map(storage_id, known))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRepeatable(Stopped.RANDOM, op_name(func))
        for tensor in written_by(func, args, given) if is_mutable(func) else ():
            if tensor.numel() and storage_id(tensor) not in self._may_write:
                raise NotRepeatable(Stopped.UNDECLARED, f"{op_name(func)} {list(tensor.shape)}")
        if is_custom(func):
            with self:
                result = call_kernel(func, args, given)
        else:
            result = func(*args, **given)
        fresh = {storage_id(each) for each in tensors_in(result)} - self._may_write
        if fresh:
            read = [] if "lift_fresh" in op_name(func) else tensors_in((args, given))
            self._may_write |= fresh - {storage_id(each) for each in read}
        return result


def _as_it_is(metadata: Any, decision: Decision) -> Any:
    return metadata


def _real_rows(results: Any, expected: Any) -> Any:
    """Results of padded inputs, cut to the shapes of those expected."""
    got, wanted = tree_leaves(results), tree_leaves(expected)
    if len(got) != len(wanted):
        return results
    return [
        one[tuple(slice(size) for size in other.shape)] if isinstance(one, Tensor) else one
        for one, other in zip(got, wanted, strict=True)
    ]


def _copied(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def _but(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [one & ~other for one, other in zip(some, others, strict=True)]


def _without_graph(num_tokens: int) -> Decision:
    return Decision(RuntimeMode.NONE, BatchDescriptor(num_tokens), NO_GRAPH, Reason.EXCLUDED)


def _batch(step: _Step) -> Batch:
    """A batch that is dispatched as the step was."""
    descriptor, tokens = step.decision.descriptor, step.num_tokens
    query_len = descriptor.uniform_query_len
    others = 1 if descriptor.for_decode else tokens  # one request: a limit on them is not exceeded
    return Batch(
        tokens,
        -(-tokens // (query_len or descriptor.max_query_len or others)),
        is_decode=descriptor.for_decode,
        query_len=query_len,
        num_loras=descriptor.lora_case,
        max_query_len=descriptor.max_query_len,
        axes=dict(descriptor.axes) or None,
    )
