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

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from math import isfinite
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch

from ....compile.ir.locations import handled
from ....config import Shadow
from ....dispatch import NO_GRAPH, Batch, Decision
from ....errors import ModelChanged, OtherRowsWritten, SetUpOnFirstUse
from ....torch_compat.basics.settings import TorchState
from ...capture.dummy_batch import preserve_rng_state
from ...capture.installed_graph import InstalledGraph
from ...core.allowed_work import allow_compilation
from ...core.arguments import checked
from ...core.code import ModelCode
from ...core.preserved import StateTooLarge
from ...core.records import ShadowStopped, WrongStep
from ...core.step_file import write_steps
from ...core_model import CoreModel
from ...part import Part, Run
from .cause import Cause, find_cause
from .coverage import Coverage
from .declared_writes import NotRepeatable, Stopped
from .lockstep import Lockstep
from .step_runs import MODEL, MOST_STATE, Keep, KeptStep, StepRuns, copied

UNSTEADY = "two uncompiled runs differ"
MOST_UNSTEADY = 8
"""Such steps in the beginning, until no more are proved. An engine's warm-up may have some."""

TOO_LARGE = f"state above {MOST_STATE >> 20} MiB"
SET_UP = "the step set up state of the model"
NO_TOKENS = "no tokens on a rank"
DUMMY = "a dummy step of the engine"

MOST_FILES = 8
"""Wrong steps that are saved."""


class ProofPart(Part):
    """Proves steps of one model. `uncompiled` is the model as it was given to `prepare`.

    `folder` is where wrong steps are saved; None makes one.
    """

    name = "proof"
    offers: ClassVar = {
        "shadow_idle": "idle",
        "prove_with": "prove_with",
        "prove_where": "prove_where",
    }

    def __init__(
        self, core: CoreModel, settings: Shadow, uncompiled: Run, folder: Path | None
    ) -> None:
        self.proved: Counter[tuple[str, int]] = Counter()
        self.skipped: Counter[str] = Counter()
        self.coverage = Coverage(settings)
        self.runs = StepRuns(core, uncompiled)
        self._settings = settings
        self._core = core
        self._steps = core.steps
        self._exchange = core.environment.exchange
        self._records = core.environment.records
        self._folder = folder
        self._stopped = False
        self._steady = False
        self._waits = False
        self._waiting: KeptStep | None = None
        self._is_real: Callable[[], bool] = lambda: True
        self._changing = set[str]()
        """Attributes that a step has changed."""
        self._proved_code: Any = None
        self._state = TorchState.now()
        """Until the first capture that of `prepare`, then that of this capture."""
        self._has_captured = False

    @checked
    def prove_with(self, keep: Keep, rebuild: Keep) -> None:
        """How to run a step again if metadata is padded to a step's descriptor.

        `keep(metadata, decision)` gives a copy of a step's metadata without padding, and
        `rebuild(kept, decision)` that for another decision: its descriptor states the tokens.
        Without them the metadata of a step is used as it is.
        """
        self.runs.keep, self.runs.rebuild = keep, rebuild

    @checked
    def prove_where(self, is_real: Callable[[], bool]) -> None:
        """Prove only steps for which `is_real()`, called before each one that is due, says so.

        A dummy step of an engine proves nothing where its attention leaves the output unwritten.
        """
        self._is_real = is_real

    def alike(self) -> dict[str, Any]:
        return {"shadow": self._settings.model_dump()}

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
        state = self.runs.state(step.args, step.kwargs)
        replaced = any(now is not step.state.get(name) for name, now in state.items())
        if not self._all_can(step.decision.graph_index, "state was replaced" if replaced else ""):
            return False
        self._timed(step, False)
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
        if not self._has_captured:
            self._has_captured, self._state = True, TorchState.now()
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
        due, skip, failure = None, "", list[str]()
        began, is_overdue = perf_counter(), self.coverage.is_overdue(index)
        first = not self.coverage.proofs[index]
        if not self._is_real():
            skip = DUMMY
        elif not is_overdue and (self._waiting is not None or not self.coverage.has_time()):
            skip = "waiting" if self._waiting else "budget"
        else:
            try:
                waits = self._waits and not is_overdue
                due = self.runs.kept(decision, args, kwargs, metadata, waits, first)
            except StateTooLarge:
                skip = TOO_LARGE
            except Exception as error:
                failure = [Stopped.FAILED, handled(error)]
        self.coverage.spend(perf_counter() - began, is_overdue)
        results = run(*step)
        num_tokens = self._steps.context.num_tokens
        skip = skip or ("" if num_tokens else NO_TOKENS)
        if due is not None and (set_up := set(due.attributes.changed()) - self._changing):
            self._changing |= set_up
            skip = SET_UP  # the second run would find it set up
        if due is not None:
            due.after = due.before.now()
            if first and (other_rows := self._other_rows(due, is_overdue)):
                failure = [Stopped.OTHER_ROWS, other_rows]
        if not self._all_can(index, skip, failure) or due is None:
            return results
        due.results, due.num_tokens = results, num_tokens
        due.decision = self._steps.context.decision
        if due.waits:
            due.results = copied(due.results)
            self._waiting = due
            return due.results
        return self._timed(due, is_overdue)

    def _other_rows(self, step: KeptStep, is_overdue: bool) -> str:
        """Which rows a step wrote of which nothing was kept: each run of a proof would write them
        once more."""
        began = perf_counter()
        self._core.environment.backend.synchronize()
        step.before.restore()
        try:
            step.before.check()
        except OtherRowsWritten as error:
            return "rows {rows} of dimension {dim} of {shape}".format(**error.facts)
        finally:
            step.after.restore()
            self.coverage.spend(perf_counter() - began, is_overdue)
        return ""

    def _all_can(self, graph_index: int, skip: str, failure: Sequence[str] = ()) -> bool:
        """Whether all ranks can prove this step; else why not, or why no further step, is noted."""
        stated = self._exchange("step to prove", {"skip": skip, "failure": [*failure]})
        for reason, detail in filter(None, (one["failure"] for one in stated)):
            self.stop(Stopped(reason), detail)
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

    def _timed(self, step: KeptStep, is_overdue: bool) -> Any:
        began, synchronize = perf_counter(), self._core.environment.backend.synchronize
        with_grad = torch.is_grad_enabled()
        synchronize()  # a copy to metadata that is rebuilt may still have to read its source
        try:
            with allow_compilation(), torch.no_grad(), preserve_rng_state():
                return self._proved(step)
        finally:
            synchronize()
            torch.set_grad_enabled(with_grad)
            self.coverage.spend(perf_counter() - began, is_overdue)

    def _proved(self, step: KeptStep) -> Any:
        """The step's results, or those of the uncompiled model if they are others.

        All ranks take out of service what the largest cause on any of them says.
        """
        runs, results, right = self.runs, copied(step.results), step.results
        final = now = step.after.now() if step.waits else step.after
        step.ranks = Lockstep(self._exchange)
        verdict: dict[str, Any] = {"stop": None, "unproved": "", "wrong": None}
        try:
            expected = runs.again(step)
            got = runs.compared(step, results, step.before, step.after)
            if not self._steady:
                self._steady = runs.is_repeated(step, expected)
                verdict["unproved"] = "" if self._steady else UNSTEADY
            wrong = runs.difference(step, expected, got) if self._steady else None
            if wrong is not None and (doubt := wrong.unknown or self._other_settings()):
                verdict["unproved"] = doubt
            elif wrong is not None:
                cause, graphs = find_cause(runs, step, expected, self._steps.code.compiled.traced)
                apart = wrong.difference if isfinite(wrong.difference) else None
                verdict["wrong"] = [list(Cause).index(cause), graphs, apart, wrong.tolerance]
                if not step.waits:  # later steps have built on what it wrote
                    now.restore()
                    right, _, final = runs.run(step, MODEL, repairs=True)
        except NotRepeatable as error:
            verdict["stop"] = [error.reason, error.detail]
        except Exception as error:
            verdict["unproved"] = self._other_settings()
            verdict["stop"] = None if verdict["unproved"] else [Stopped.FAILED, handled(error)]
        try:
            verdicts = step.ranks.finish(
                verdict, lambda way: runs.run_alone(step, way, step.before)
            )
        finally:
            final.restore()
        self._conclude(step, verdicts, verdict["wrong"] is not None)
        return right

    def _other_settings(self) -> str:
        """Why a difference may be that of the process: another thread that loads a model sets the
        default dtype for all of them. One that is gone meanwhile is seen as rounding."""
        changed = self._state.changed_in_process(of_both=True)
        return f"settings of the process are others: {changed}" if changed else ""

    def _conclude(self, step: KeptStep, verdicts: Sequence[Any], is_wrong: bool) -> None:
        """Do what the verdicts of all ranks say; the step is saved where it `is_wrong`."""
        for reason, detail in filter(None, (one["stop"] for one in verdicts)):
            self.stop(Stopped(reason), detail)
            return
        wrong = [one["wrong"] for one in verdicts if one["wrong"]]
        unproved = [one["unproved"] for one in verdicts if one["unproved"]]
        if unproved and (UNSTEADY in unproved or not wrong):
            self._skip(step.decision.graph_index, unproved[0])
            if self.skipped[UNSTEADY] == MOST_UNSTEADY:
                self.stop(Stopped.UNSTEADY)
            return
        decision = step.decision
        self.proved[decision.mode.name, decision.descriptor.num_tokens] += 1
        self.coverage.prove(decision.graph_index, sum(self._steps.usage.by_graph().values()))
        repaired = decision.graph_index == NO_GRAPH and not self._steps.code.compiled.traced
        if wrong:
            cause, _, apart, tolerance = max(wrong, key=itemgetter(0))
            graphs = sorted({graph for _, graphs, *_ in wrong for graph in graphs})
            self._book(step, apart, tolerance, list(Cause)[cause], graphs, is_wrong)
            if repaired:
                self.stop(Stopped.REPAIR, f"a step of {step.num_tokens} tokens")

    def _book(
        self,
        step: KeptStep,
        apart: float | None,
        tolerance: float,
        cause: Cause,
        graphs: list[int],
        is_wrong: bool,
    ) -> None:
        decision = step.decision
        entries = self._steps.dispatcher.plan.entries
        names = [f"{entries[i].mode.name} {entries[i].descriptor.num_tokens}" for i in graphs]
        file, changed = self._saved(step) if is_wrong else None, self._changed(decision.graph_index)
        by = "by another result" if apart is None else f"by {apart:.3g} > {tolerance:.3g}"
        reason = f"a step of {step.num_tokens} tokens differs {by}"
        out = self._take_out(cause, graphs, reason)
        self._records.add(
            WrongStep(
                decision.mode.name, step.num_tokens, decision.descriptor.num_tokens,
                decision.graph_index, apart, tolerance, out.value,
                names, str(file) if file else None, changed,
            )
        )  # fmt: skip

    def _changed(self, graph_index: int) -> str:
        """What is no longer as the code, or the graph, of the step relies on, by name."""
        graphs = {graph.index: graph for graph in self._core.graphs.present()}
        moved = self._core.parts.moved(graphs.get(graph_index)) or []
        changes = [f"{name} moved" for name in moved]
        try:
            for part in self._core.parts:
                part.refreshing()
        except ModelChanged as error:
            changes.append(str(error.facts["changes"]))
        return "; ".join(changes)

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

    def _saved(self, step: KeptStep) -> Path | None:
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
            self._records.events.emit("shadow.not_saved", reason=handled(error))
            return None
        return file


def _batch(step: KeptStep) -> Batch:
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
