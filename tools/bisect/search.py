"""Run the stages in order until a step is wrong, then find the location and the cause.

Only what was tested is reported. Nothing is written to the user's cache: it is read as a layer of a
temporary one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ... import PreparedModel
from ...compile.conditions.conditions import broken_conditions
from ...config import compile_config
from ...dispatch import default_capture_sizes
from ...errors import InvalidSetting, PieceFailed, PiecegraphError
from .case import BisectCase, Finding, Wrong, first_wrong, load_case, write_script
from .culprit import Cause, PieceSearch, WrongCall, find_call, find_guard, find_piece
from .observe import Ran, run_eagerly, run_prepared, splitting_ops
from .operations import find_operation
from .stages import (
    COMPILER,
    EAGER,
    FULL,
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
from .state import State, addresses

Say = Callable[[str], None]

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 61, 127, 251, 509, 1021, 2039)


def bisect(
    case: BisectCase, *, script: Path | None = None, say: Say = lambda line: None
) -> Finding | None:
    """The first stage at which `case` gives a wrong result or raises; None if all stages are right.

    `say` is called with the verdict on each stage and with what was covered. With `script` a Python
    file is written there that reproduces the finding, with the files it needs beside it; see
    `write_script`. Raises InvalidSetting for a configuration without a stage.
    """
    if not any(stages(case.config)):
        reason = "graphs are off as well, which leaves nothing that could be wrong"
        expected = "to have one of the two on"
        raise InvalidSetting(name="compile", value=False, reason=reason, expected=expected)
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


@dataclass(frozen=True, slots=True)
class _Failure:
    """The first step that raised or is wrong."""

    index: int
    wrong: Wrong | None
    right: Ran
    ran: Ran
    again: Callable[[], Ran]
    """Runs the uncompiled model again, up to the step."""


class _Search:
    """One search; the state of layers and buffers is as before when it ends."""

    def __init__(self, case: BisectCase, say: Say) -> None:
        self.case = case
        self.say = say
        self.state = State(case.model, case.layers)

    def run(self) -> Finding | None:
        try:
            right = run_eagerly(self.case)
            finding = self._unsteady(right)
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
        right = run_eagerly(self.case)
        if name == EAGER:
            return self._unsteady(right)
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
                note = f"preparing raised {_described_error(error)}"
                return Finding(stage.name, 0, size, size, piece, note=note)
            self.state.restore()
            where = addresses(case.model, case.layers)
            watched = self.state if stage.name in STRATEGIES else None
            runs = run_prepared(case, prepared, state=watched)
            moved = _moved(where, addresses(case.model, case.layers))
            failure = self._first_failure(case, right, runs)
            if failure is None:
                return self._sweep(stage, prepared) if stage.name in (COMPILER, WARM) else None
            finding = self._located(stage, prepared, failure)
        if stage.name in (PIECEWISE, FULL, *STRATEGIES):
            causes = _tried(self._graph_causes, stage, failure)
            finding = _noted(finding, moved, causes)
        return finding

    def _first_failure(
        self, case: BisectCase, right: Sequence[Ran], runs: Sequence[Ran]
    ) -> _Failure | None:
        """The first step that raised or is wrong."""
        for index, (want, ran) in enumerate(zip(right, runs, strict=False)):
            run = partial(self._again, case, index)

            def results(run: Callable[[], Ran] = run) -> Any:
                return run().results

            wrong = None
            if ran.error is None:
                wrong = first_wrong(want.results, ran.results, case.tolerance, results)
            if ran.error is not None or wrong is not None:
                return _Failure(index, wrong, want, ran, run)
        return None

    def _again(self, case: BisectCase, index: int) -> Ran:
        """Run the steps up to this one eagerly again."""
        self.state.restore()
        return run_eagerly(replace(case, steps=case.steps[: index + 1]))[-1]

    def _unsteady(self, right: Sequence[Ran]) -> Finding | None:
        """A finding if the model differs from itself: then nothing can be compared with it."""
        self.state.restore()
        for index, (want, ran) in enumerate(zip(right, run_eagerly(self.case), strict=True)):
            wrong = first_wrong(want.results, ran.results, self.case.tolerance)
            if wrong is not None:
                size = self.case.steps[index].batch.num_tokens
                note = "the model itself gives another result the second time"
                return Finding(EAGER, index, size, size, wrong=wrong, note=note)
        return None

    def _located(self, stage: Stage, prepared: PreparedModel, failure: _Failure) -> Finding:
        case, ran = self.case, failure.ran
        size, padded = (
            case.steps[failure.index].batch.num_tokens,
            ran.decision.descriptor.num_tokens,
        )
        plan = prepared.compiled.plan.at(padded)
        finding = Finding(stage.name, failure.index, size, padded, wrong=failure.wrong)
        if ran.error is not None:
            finding = replace(finding, note=f"the step raised {_described_error(ran.error)}")
            if stage.name in (TRACED, PIECEWISE, FULL, *STRATEGIES):
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
            return replace(
                finding,
                note=f"{note}; a capture before this step changed {changed}" if changed else note,
            )
        if stage.name == FULL and not ran.calls:
            right = (
                "; right with splitting ops between the graphs" if case.config.splitting_ops else ""
            )
            finding = replace(finding, note=f"inside the FULL graph{right}")
        if finding.note or not case.config.compile or (plan.cut_at and stage.name != PARTITIONS):
            return _caused(finding, find_operation, case, stage, failure.index, self.state)
        try:
            call = find_call(plan, failure.right, ran, case.tolerance, failure.again)
        except Exception as error:
            return _noted(finding, _failed(error))
        if call is not None and call.itself:
            op = call.op.rpartition(".")[0]
            if stage.name in (PIECEWISE, FULL):  # right at the stages before: not the op
                return replace(finding, note=f"first seen in what {op} gives")
            return replace(finding, operator=op)
        use = find_piece(plan, failure.right, call)
        if use is None:
            return finding
        piece = plan.piece_uses()[use]
        note = f"piece {piece} is {plan.pieces[piece].digest[:12]}, use {use}"
        finding = replace(finding, piece=piece, note=note)
        if stage.name == WARM:
            return replace(finding, note=f"{note}; compiled again it is right: remove its artifact")
        self.state.restore()
        at_stage = replace(case, config=case.config.changed(**stage.settings))
        if stage.name == COMPILER:
            return _caused(
                finding, lambda: PieceSearch(at_stage, prepared).find(use, failure.index, size)
            )
        if stage.name == PIECEWISE:
            return _caused(
                finding,
                lambda: PieceSearch(at_stage, prepared).find_mixing(use, failure.index, padded),
            )
        return finding

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

    def _graph_causes(self, stage: Stage, failure: _Failure) -> str:
        """The change that makes the step right."""
        step, decision = self.case.steps[failure.index], failure.ran.decision
        causes = [self._history(stage, failure.index)]
        if decision.descriptor.num_tokens > step.batch.num_tokens and failure.ran.error is None:
            causes += [self._padding(stage, failure.index)]
        return "; ".join(filter(None, causes))

    def _changed_model(self, prepared: PreparedModel, index: int) -> str:
        """What the trace relied on and does not hold at the step."""
        self.state.restore()
        run_prepared(replace(self.case, steps=self.case.steps[: index + 1]), prepared)
        broken = broken_conditions(prepared.compiled.conditions, self.case.model)
        return "; ".join(f"`{b.what}` was {b.old} at the trace and is {b.new}" for b in broken)

    def _history(self, stage: Stage, index: int) -> str:
        """Whether the step is wrong on its own, or only after those before it."""
        if index == 0 or stage.name in STRATEGIES:
            return ""
        if self._is_right(stage, index):
            return "right as the first step: something of an earlier step is left in rows or state"
        return "wrong as the first step too"

    def _padding(self, stage: Stage, index: int) -> str:
        """Whether padding is needed for the step to be wrong."""
        size = self.case.steps[index].batch.num_tokens
        if not self._is_right(stage, index, capture_sizes=(size,)):
            return ""
        return "right without padding"

    def _is_right(self, stage: Stage, index: int, **settings: Any) -> bool:
        """Whether the step alone is right, with other settings."""
        config = self.case.config.changed(**settings)
        alone = replace(self.case, config=config, steps=[self.case.steps[index]])
        self.state.restore()
        right = run_eagerly(alone)
        self.state.restore()
        try:
            with prepared_for(alone, stage) as prepared:
                self.state.restore()
                runs = run_prepared(alone, prepared)
        except Exception:
            return False
        return self._first_failure(alone, right, runs) is None


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


def _moved(before: dict[str, int], after: dict[str, int]) -> str:
    names = [name for name, place in after.items() if before.get(name) != place]
    return f"moved after the capture: {', '.join(names)}" if names else ""


def _described_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
