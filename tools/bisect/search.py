"""Climb the ladder until a step is wrong, then look closer: which piece, which operator, why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ... import Config, PreparedModel
from ...errors import InvalidSetting
from .case import BisectCase
from .culprit import find_call, find_guard, find_operator, find_piece
from .finding import Finding, Wrong, first_wrong
from .observe import Ran, run_eagerly, run_prepared
from .script import write_script
from .stages import COMPILER, EAGER, FULL, PIECEWISE, TRACED, WARM, Stage, prepared_for, stages
from .state import State, addresses

Say = Callable[[str], None]


def bisect(
    case: BisectCase, *, script: Path | None = None, say: Say = lambda line: None
) -> Finding | None:
    """The lowest stage on which `case` gives a wrong number or raises; None if all is right.

    `say` is told each stage's verdict. With `script` a Python file is written there that repeats
    the finding, with what it needs beside it; see `write_script`. Raises InvalidSetting for a
    configuration without a stage.
    """
    if not any(stages(case.config)):
        raise InvalidSetting(
            name="compile",
            value=False,
            reason="graphs are off as well, which leaves nothing that could be wrong",
            expected="to have one of the two on",
        )
    state = State(case.model, case.layers)
    try:
        finding = _search(case, state, say)
    finally:
        state.restore()
    if finding is not None and script is not None:
        write_script(case, finding, script, say)
    return finding


def reproduce(data: Path, stage: str) -> int:
    """Check one stage of a case saved by `write_script`: 1 if it is wrong, 0 if it is right.

    The file is unpickled: run only scripts that you have made yourself.
    """
    facts = torch.load(data, weights_only=False)
    finding = check_stage(BisectCase(**{**facts, "config": Config(**facts["config"])}), stage)
    print(finding.line() if finding else f"stage {stage} is right")
    return 1 if finding else 0


def check_stage(case: BisectCase, name: str) -> Finding | None:
    """Run just one stage, by name, against the eager model."""
    state = State(case.model, case.layers)
    truth = run_eagerly(case)
    if name == EAGER:
        return _unsteady(case, state, truth)
    (stage,) = (stage for stage in stages(case.config) if stage.name == name)
    return _check(case, stage, state, truth)


def _search(case: BisectCase, state: State, say: Say) -> Finding | None:
    truth = run_eagerly(case)
    finding = _unsteady(case, state, truth)
    for stage in stages(case.config):
        if finding is not None:
            break
        finding = _check(case, stage, state, truth)
        say(f"{stage.name}: {'wrong' if finding else 'right'}")
    return finding


def _unsteady(case: BisectCase, state: State, truth: Sequence[Ran]) -> Finding | None:
    """A finding if the eager model differs from itself: then there is no truth to compare with."""
    state.restore()
    failure = _first_failure(truth, run_eagerly(case), case.tolerance)
    if failure is None:
        return None
    size = case.steps[failure[0]].batch.num_tokens
    note = "the model itself gives another result the second time"
    return Finding(EAGER, failure[0], size, size, None, None, failure[1], note)


def _check(case: BisectCase, stage: Stage, state: State, truth: Sequence[Ran]) -> Finding | None:
    state.restore()
    with ExitStack() as stack:
        try:
            prepared = stack.enter_context(prepared_for(case, stage))
        except Exception as error:
            size = case.steps[0].batch.num_tokens
            note = f"preparing raised {_described_error(error)}"
            return Finding(stage.name, 0, size, size, None, None, None, note)
        state.restore()
        where = addresses(case.model, case.layers)
        runs = run_prepared(case, prepared)
        failure = _first_failure(truth, runs, case.tolerance)
        if failure is None:
            return None
        moved = _moved(where, addresses(case.model, case.layers))
        index, wrong = failure
        finding = _located(case, stage, prepared, state, truth[index], runs[index], index, wrong)
    if stage.name in (PIECEWISE, FULL):
        notes = (finding.note, moved, _history(case, stage, state, index))
        return replace(finding, note="; ".join(note for note in notes if note))
    return finding


def _first_failure(
    truth: Sequence[Ran], runs: Sequence[Ran], tolerance: float | None
) -> tuple[int, Wrong | None] | None:
    """Index of the first step that raised or is wrong, and the wrong element."""
    for index, (right, ran) in enumerate(zip(truth, runs, strict=False)):
        if ran.error is not None:
            return index, None
        if wrong := first_wrong(right.results, ran.results, tolerance):
            return index, wrong
    return None


def _located(
    case: BisectCase,
    stage: Stage,
    prepared: PreparedModel,
    state: State,
    right: Ran,
    ran: Ran,
    index: int,
    wrong: Wrong | None,
) -> Finding:
    size = case.steps[index].batch.num_tokens
    finding = Finding(
        stage.name, index, size, ran.decision.descriptor.num_tokens, None, None, wrong
    )
    if ran.error is not None:
        return replace(finding, note=f"the step raised {_described_error(ran.error)}")
    plan = prepared.compiled.plan
    if stage.name == TRACED:
        operator, note = find_guard(plan, size)
        return replace(finding, operator=operator, note=note)
    if stage.name == FULL and not ran.calls:
        operator = ", ".join(case.config.splitting_ops) or None
        return replace(finding, operator=operator, note="right with these ops between the graphs")
    call = find_call(right, ran, case.tolerance)
    if call is not None and call.itself:
        return replace(finding, operator=right.calls[call.index].op)
    use = find_piece(plan, call)
    if use is None:
        return finding
    piece = plan.piece_uses()[use]
    note = f"piece {piece} is {plan.pieces[piece].digest[:12]}, use {use}"
    finding = replace(finding, piece=piece, note=note)
    if stage.name == COMPILER:
        state.restore()
        on_stage = replace(case, config=case.config.changed(**stage.settings))
        operator = find_operator(on_stage, prepared, index, use)
        note = note if operator else f"{note}; compiled by itself it is right"
        return replace(finding, operator=operator, note=note)
    if stage.name == WARM:
        return replace(finding, note=f"{note}; compiled anew it is right: remove its artifact")
    return finding


def _moved(before: dict[str, int], after: dict[str, int]) -> str:
    names = [name for name, place in after.items() if before.get(name) != place]
    return f"moved after the capture: {', '.join(names)}" if names else ""


def _history(case: BisectCase, stage: Stage, state: State, index: int) -> str:
    """Whether the step is wrong on its own, or only after those before it."""
    if index == 0:
        return ""
    alone = replace(case, steps=[case.steps[index]])
    state.restore()
    truth = run_eagerly(alone)
    finding = _check(alone, stage, state, truth)
    if finding is None:
        return "right as the first step: something of an earlier step is left in rows or state"
    return "wrong as the first step too"


def _described_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
