"""Run the stages in order until a step is wrong, then find the location and the cause.

Only what was tested is reported. Nothing is written to the user's cache: it is read as a layer of a
temporary one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ... import PreparedModel, RuntimeMode
from ...compile.conditions.conditions import broken_conditions
from ...compile.ir.locations import error_line
from ...config import compile_config
from ...dispatch import default_capture_sizes
from ...errors import InvalidSetting, PieceFailed, PiecegraphError
from .case import BisectCase, Finding, Wrong, first_wrong, load_case, of_one_form, write_script
from .culprit import Cause, PieceSearch, WrongCall, find_call, find_guard, find_piece
from .observe import Ran, run_eagerly, run_model, run_prepared, splitting_ops
from .operations import OpTrace, find_operation, first_other_op
from .rerun import Failure, Rerun
from .stages import (
    COMPILER,
    EAGER,
    FULL,
    GRAPHS,
    PARTITIONS,
    PIECEWISE,
    STRATEGIES,
    TRACED,
    WARM,
    Stage,
    prepared_for,
    stages,
    with_own_cache,
)
from .state import ModelState, row_numbers

Say = Callable[[str], None]

MOST_TEXT = 80
"""Characters of a value that a note shows."""

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 61, 127, 251, 509, 1021, 2039)


def bisect(
    case: BisectCase, *, script: Path | None = None, say: Say = lambda line: None
) -> Finding | None:
    """The first stage at which `case` gives a wrong result or raises; None if all stages are right.

    `say` is called with the verdict on each stage and with what was covered. With `script` a Python
    file is written there that reproduces the finding, with the files it needs beside it; see
    `write_script`. Raises InvalidSetting for a configuration without a stage, and
    for steps of several call forms.
    """
    if not any(stages(case.config)):
        reason = "graphs are off as well, which leaves nothing that could be wrong"
        expected = "to have one of the two on"
        raise InvalidSetting(name="compile", value=False, reason=reason, expected=expected)
    case = of_one_form(case)
    with tempfile.TemporaryDirectory(prefix="piecegraph-bisect-") as folder:
        own = replace(case, config=with_own_cache(case.config, Path(folder)))
        search = _Search(own, say)
        finding = search.run()
        if finding is not None and script is not None:
            write_script(
                case, finding, script, say, Path(folder) if finding.stage == WARM else None
            )
    return finding


def reproduce(data: Path, stage: str) -> int:
    """Check one stage of a case saved by `write_script`: 1 if it is wrong, 0 if it is right.

    The file is unpickled: run only scripts that you created yourself.
    """
    case = load_case(data)
    with tempfile.TemporaryDirectory(prefix="piecegraph-bisect-") as folder:
        own = replace(case, config=with_own_cache(case.config, Path(folder)))
        finding = _Search(own, lambda line: None).check_named(stage)
    print(finding.line() if finding else f"stage {stage} is right")
    return 1 if finding else 0


class _Search:
    """One search; the state of layers and buffers is as before when it ends."""

    def __init__(self, case: BisectCase, say: Say) -> None:
        self.case = case
        self.say = say
        self.state = ModelState(case.model, case.layers)

    def run(self) -> Finding | None:
        try:
            right = run_eagerly(self.case, self.state)
            finding = self._of_the_model(right)
            for stage in stages(self.case.config):
                if finding is not None:
                    break
                finding = self.check(stage, right)
                self.say(f"{stage.name}: {'wrong' if finding else 'right'}")
            return finding
        finally:
            self.state.restore()

    def check_named(self, name: str) -> Finding | None:
        """Check one stage alone."""
        right = run_eagerly(self.case, self.state)
        if name == EAGER or right[-1].error is not None:
            return self._of_the_model(right)
        (stage,) = (each for each in stages(self.case.config) if each.name == name)
        return self.check(stage, right)

    def check(self, stage: Stage, right: Sequence[Ran]) -> Finding | None:
        """A finding if a step, or a piece at another size, is wrong at this stage."""
        case = self.case
        self.state.restore()
        with ExitStack() as stack:
            try:
                prepared = stack.enter_context(prepared_for(case, stage))
            except Exception as error:
                size = case.steps[0].batch.num_tokens
                piece = error.facts.get("piece") if isinstance(error, PieceFailed) else None
                notes = f"preparing raised {_described_error(error)}", self._padding_value(stage)
                return _noted(Finding(stage.name, 0, size, size, piece), *notes)
            self.state.restore()
            prepared.parts.checks.compare_all()
            watch = stage.name in STRATEGIES
            runs = run_prepared(case, prepared, self.state, right, watch=watch)
            failure = self._first_failure(right, runs)
            if failure is None:
                return self._sweep(stage, prepared) if stage.name in (COMPILER, WARM) else None
            finding = self._located(stage, prepared, failure)
            if stage.name in (PIECEWISE, FULL) and failure.ran.error is None:
                try:
                    return self._by_rerun(stage, prepared, failure, finding)
                except Exception as error:
                    return _noted(finding, _failed(error))
        return finding

    def _first_failure(self, right: Sequence[Ran], runs: Sequence[Ran]) -> Failure | None:
        """The first step that raised or is wrong, in its results or in what it wrote."""
        for index, (want, ran) in enumerate(zip(right, runs, strict=False)):
            again = partial(self._again, index)
            wrong = None
            if ran.error is None:
                tolerance = self.case.tolerance
                measured = lambda again=again: again().compared  # noqa: E731
                wrong = first_wrong(want.compared, ran.compared, tolerance, measured)
            if ran.error is not None or wrong is not None:
                return Failure(index, wrong and _of_state(wrong, want), want, ran, again)
        return None

    def _again(self, index: int) -> Ran:
        """Run the steps up to this one eagerly again."""
        self.state.restore()
        case = replace(self.case, steps=self.case.steps[: index + 1])
        return run_eagerly(case, self.state)[-1]

    def _of_the_model(self, right: Sequence[Ran]) -> Finding | None:
        """A finding if the model raises or differs from itself: nothing can be compared then."""
        self.state.restore()
        for index, (want, ran) in enumerate(
            zip(right, run_eagerly(self.case, self.state), strict=False)
        ):
            size = self.case.steps[index].batch.num_tokens
            finding = Finding(EAGER, index, size, size)
            if want.error is not None:
                where = error_line(want.error)
                at = f" (at {where.rpartition('/')[2]})" if where else ""
                note = f"the model itself raised {_described_error(want.error)}{at}"
                return replace(finding, note=note)
            wrong = first_wrong(want.compared, ran.compared, self.case.tolerance)
            if ran.error is not None or wrong is not None:
                note = "the model itself gives another result the second time"
                finding = replace(finding, wrong=wrong and _of_state(wrong, want), note=note)
                return _caused(finding, self._unsteady_operation, index)
        return None

    def _unsteady_operation(self, index: int) -> Cause:
        """The first operation of a step that gives something else in another run of the steps."""
        traces = [OpTrace(self.case.model) for _ in range(2)]
        for trace in traces:
            self.state.restore()
            run_eagerly(replace(self.case, steps=self.case.steps[:index]), self.state)
            run_model(self.case, self.case.steps[index], self.state, trace)
        found = first_other_op(traces[0].ops, traces[1].ops)
        return (None, None, "") if found is None else (str(traces[0].ops[found[0]]), None, found[1])

    def _located(self, stage: Stage, prepared: PreparedModel, failure: Failure) -> Finding:
        case, ran = self.case, failure.ran
        size, padded = (
            case.steps[failure.index].batch.num_tokens,
            ran.decision.descriptor.num_tokens,
        )
        plan = prepared.compiled.plan.at(padded)
        finding = Finding(stage.name, failure.index, size, padded, wrong=failure.wrong)
        if ran.error is not None:
            finding = replace(finding, note=f"the step raised {_described_error(ran.error)}")
            if stage.name in (TRACED, *GRAPHS):
                return finding
            if ran.inside is not None:
                return replace(finding, operator=ran.inside.rpartition(".")[0])
            if isinstance(ran.error, PiecegraphError):  # of the step, not of the code of a piece
                return finding
            running = WrongCall(len(ran.calls_of(splitting_ops(plan))), "", itself=False)
            use = find_piece(plan, failure.right, running)
            return replace(finding, piece=None if use is None else plan.piece_uses()[use])
        if stage.name == TRACED:
            finding = _caused(finding, find_guard, plan, size)
            return _noted(finding, _tried(self._changed_model, prepared, failure.index))
        if stage.name in STRATEGIES:
            note = "right with all graphs captured at startup"
            changed = ", ".join(dict.fromkeys(ran.clobbered))
            change = f"a capture before this step changed {changed}" if changed else ""
            return _noted(finding, note, change)
        if ran.decision.mode is RuntimeMode.FULL:
            right = (
                "; right with splitting ops between the graphs" if case.config.splitting_ops else ""
            )
            finding = replace(finding, note=f"inside the FULL graph{right}")
        if (
            not case.config.compile
            or ran.decision.mode is RuntimeMode.FULL
            or (plan.cut_at and stage.name != PARTITIONS)
        ):
            return finding
        try:
            call = find_call(plan, failure.right, ran, case.tolerance, failure.again)
        except Exception as error:
            return _noted(finding, _failed(error))
        if call is not None and call.itself:
            if stage.name in GRAPHS:  # right at the stages before: not the op
                return finding
            return replace(finding, operator=call.op.rpartition(".")[0])
        use = find_piece(plan, failure.right, call)
        if use is None:
            return finding
        piece = plan.piece_uses()[use]
        note = f"piece {piece} is {plan.pieces[piece].digest[:12]}, use {use}"
        if call is not None and call.buffer:
            note += f"; it writes {call.buffer} wrongly"
        finding = replace(finding, piece=piece, note=note)
        if stage.name == WARM:
            return replace(finding, note=f"{note}; compiled again it is right: remove its artifact")
        self.state.restore()
        at_stage = replace(case, config=case.config.changed(**stage.settings))
        if stage.name == COMPILER:
            return _caused(
                finding, lambda: PieceSearch(at_stage, prepared).find(use, failure.index, size)
            )
        return finding

    def _by_rerun(
        self, stage: Stage, prepared: PreparedModel, failure: Failure, finding: Finding
    ) -> Finding:
        """What the step does from the state before it, in lower modes; see `rerun`."""
        case = self.case
        rerun = Rerun(case, prepared, self.state, failure)
        size, padded = rerun.size, rerun.padded
        graph = rerun.graph()
        if rerun.is_right(graph):
            left = "" if rerun.is_as_expected(graph) else rerun.left_behind()
            if left:
                return _noted(replace(finding, piece=None), left)
            return self._by_operation(stage, failure, finding, "run again from there it is right")
        if padded > size:
            if case.capture_metadata is not None and rerun.is_right(rerun.fresh_graph()):
                note = "right if padding of its metadata is as at the capture: something of an "
                return _noted(replace(finding, piece=None), f"{note}earlier step is left there")
            model = rerun.padded_model()
            if not rerun.is_right(model):
                too = "gives what the graph gives" if rerun.same_rows(model, graph) else "is wrong"
                note = f"the model itself {too}"
                return self._by_rows(prepared, rerun, rerun.wrong_state(model), finding, note)
            if not rerun.is_right(rerun.padded_code()):
                return _noted(finding, f"the model is right on {padded} rows, compiled code is not")
        if not rerun.is_right(rerun.code()):
            return _noted(finding, "wrong without a graph, too, from the state before the step")
        return self._by_operation(stage, failure, finding, "right without a graph on the same rows")

    def _by_operation(self, stage: Stage, failure: Failure, finding: Finding, note: str) -> Finding:
        """The first operation that is other in the graph than in the model."""
        if stage.name == FULL or not self.case.config.compile:
            index = failure.index
            finding = _caused(finding, find_operation, self.case, stage, index, self.state)
        return _noted(finding, note)

    def _by_rows(
        self,
        prepared: PreparedModel,
        rerun: Rerun,
        state: Sequence[str],
        finding: Finding,
        note: str,
    ) -> Finding:
        """The model itself is other on the padded rows: why, and from which operation on."""
        zeros, ones = rerun.padded_model(0), rerun.padded_model(1)
        if rerun.same_rows(zeros, ones):
            note += f": it depends on how many rows there are, {rerun.padded} or {rerun.size}"
        else:
            note += ": its real rows depend on what padding holds"
        if state:
            note += f"; it writes {', '.join(state)} otherwise"
        alone, padded = (trace.ops for trace in rerun.operations())
        found = first_other_op(alone, padded)
        if found is None:
            return _noted(finding, note)
        index, how = found
        finding = replace(finding, operator=str(alone[index]), piece=None, note="")
        plan = prepared.compiled.plan.at(rerun.padded)
        ops = splitting_ops(plan)
        if ops and alone[index].op not in ops:
            calls = sum(one.op in ops for one in alone[:index])
            use = find_piece(plan, rerun.right, WrongCall(calls, "", itself=False))
            finding = replace(finding, piece=None if use is None else plan.piece_uses()[use])
        return _noted(finding, note, how)

    def _again_in(self, prepared: PreparedModel, index: int) -> None:
        """Run the steps up to this one in `prepared` again."""
        self.state.restore()
        case = replace(self.case, steps=self.case.steps[: index + 1])
        right = run_eagerly(case, self.state)
        self.state.restore()
        run_prepared(case, prepared, self.state, right)

    def _padding_value(self, stage: Stage) -> str:
        """The inputs whose stated padding is why it cannot be captured: without it, it can."""
        stated, names = self.case.config.steps.padding, []
        for name in stated:
            rest = {other: value for other, value in stated.items() if other != name}
            case = replace(self.case, config=self.case.config.changed(**{"steps.padding": rest}))
            self.state.restore()
            with suppress(Exception), prepared_for(case, stage):
                names.append(name)
        return "; ".join(
            f"it can if steps.padding of input `{name}` is not {stated[name]}" for name in names
        )

    def _sweep(self, stage: Stage, prepared: PreparedModel) -> Finding | None:
        """Run each unique piece at sizes that steps may not have, and compare it with its graph."""
        config = self.case.config.changed(**stage.settings)
        try:
            search = PieceSearch(replace(self.case, config=config), prepared)
        except Exception as error:
            self.say(f"{stage.name}: no other sizes compared, {_failed(error)}")
            return None
        compiling = compile_config(config)
        low, high = compiling.limits("num_tokens")
        ranges = [each for plan in prepared.compiled.plan.intervals() for each in plan.ranges]
        sizes = {1, 2, 3, *PRIMES, *(end for each in ranges for end in (each.low, each.high))}
        sizes |= {step.batch.num_tokens for step in self.case.steps}
        sizes |= {*(config.capture_sizes or default_capture_sizes(config.max_num_reqs, high))}
        covered = sorted(size for size in sizes if low <= size <= high)
        shown, skipped = ", ".join(map(str, covered)), set[str]()
        for size in covered:
            (interval,) = (each for each in ranges if each.low <= size <= each.high)
            for index, artifact in enumerate(interval.artifacts):
                piece, fn = search.pieces_at(size)[index], prepared.compiled.pieces[artifact]
                values = piece.sizes(compiling, size)
                try:
                    difference = piece.difference(fn, values)
                except Exception:  # an op inside needs more than generated inputs
                    skipped.add(piece.digest)
                    continue
                if difference is None:
                    continue
                note = f"no step has this size; on generated inputs {difference}"
                finding = Finding(stage.name, None, size, size, index, note=note)
                return _caused(finding, search.find_at_size, piece, values, size)
        unique = {piece.digest for pieces in search.pieces for piece in pieces}
        compared = f"{len(unique - skipped)} of {len(unique)} pieces"
        self.say(f"{stage.name}: {compared} compared at {shown}")
        return None

    def _changed_model(self, prepared: PreparedModel, index: int) -> str:
        """What the trace relied on and does not hold at the step."""
        self._again_in(prepared, index)
        broken = broken_conditions(prepared.compiled.conditions, self.case.model)
        changes = ((b.what, _short(str(b.old)), _short(str(b.new))) for b in broken)
        return "; ".join(f"`{w}` was {old} at the trace and is {new}" for w, old, new in changes)


def _of_state(wrong: Wrong, want: Ran) -> Wrong:
    """`wrong` with its name and its real row, if it is of the state."""
    number = wrong.tensor - len(want.results)
    if number < 0:
        return wrong
    row, *rest = wrong.element or (0,)
    rows = row_numbers(want.written[number])
    place = (rows[row] if row < len(rows) else row, *rest)
    return replace(wrong, name=want.before.names[number], element=place)


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."


def _noted(finding: Finding, *notes: str) -> Finding:
    return replace(finding, note="; ".join(filter(None, (finding.note, *notes))))


def _caused(finding: Finding, search: Callable[..., Cause], *args: Any) -> Finding:
    """The finding with the cause that a search gives; a search that fails is noted."""
    try:
        operator, graph_pass, note = search(*args)
    except Exception as error:
        return _noted(finding, _failed(error))
    return _noted(replace(finding, operator=operator, graph_pass=graph_pass), note)


def _tried(search: Callable[..., str], *args: Any) -> str:
    """What a search says; one that fails loses nothing of what was found before it."""
    try:
        return search(*args)
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> str:
    return f"search failed: {_described_error(error)}"


def _described_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
