"""Climb the ladder until a step is wrong, then look closer: which piece, which operator, why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ... import PreparedModel
from ...errors import InvalidSetting
from .compare import Wrong, first_wrong
from .finding import Finding
from .ladder import COMPILER, EAGER, FULL, PIECEWISE, TRACED, WARM, Rung, prepared_for, rungs
from .locate import guilty_call, guilty_guard, guilty_piece
from .observe import Ran, run_eagerly, run_prepared
from .operators import guilty_operator
from .script import write_script
from .state import State, addresses
from .subject import Subject

Say = Callable[[str], None]


def bisect(
    subject: Subject, *, script: Path | None = None, say: Say = lambda line: None
) -> Finding | None:
    """The lowest rung on which `subject` gives a wrong number or raises; None if all is right.

    `say` is told each rung's verdict. With `script` a Python file is written there that repeats
    the finding, with what it needs beside it; see `write_script`. Raises InvalidSetting for a
    configuration without a rung.
    """
    if not any(rungs(subject.config)):
        raise InvalidSetting(
            name="compile",
            value=False,
            reason="graphs are off as well, which leaves nothing that could be wrong",
            expected="to have one of the two on",
        )
    state = State(subject.model, subject.layers)
    try:
        finding = _climb(subject, state, say)
    finally:
        state.restore()
    if finding is not None and script is not None:
        write_script(subject, finding, script, say)
    return finding


def check_stage(subject: Subject, stage: str) -> Finding | None:
    """Run just one rung, by name, against the eager model."""
    state = State(subject.model, subject.layers)
    truth = run_eagerly(subject)
    if stage == EAGER:
        return _unsteady(subject, state, truth)
    (rung,) = (rung for rung in rungs(subject.config) if rung.name == stage)
    return _check(subject, rung, state, truth)


def _climb(subject: Subject, state: State, say: Say) -> Finding | None:
    truth = run_eagerly(subject)
    finding = _unsteady(subject, state, truth)
    for rung in rungs(subject.config):
        if finding is not None:
            break
        finding = _check(subject, rung, state, truth)
        say(f"{rung.name}: {'wrong' if finding else 'right'}")
    return finding


def _unsteady(subject: Subject, state: State, truth: Sequence[Ran]) -> Finding | None:
    """A finding if the eager model differs from itself: then there is no truth to compare with."""
    state.restore()
    failure = _first_failure(truth, run_eagerly(subject), subject.tolerance)
    if failure is None:
        return None
    size = subject.steps[failure[0]].batch.num_tokens
    note = "the model itself gives another result the second time"
    return Finding(EAGER, failure[0], size, size, None, None, failure[1], note)


def _check(subject: Subject, rung: Rung, state: State, truth: Sequence[Ran]) -> Finding | None:
    state.restore()
    with ExitStack() as stack:
        try:
            prepared = stack.enter_context(prepared_for(subject, rung))
        except Exception as error:
            size = subject.steps[0].batch.num_tokens
            note = f"preparing raised {_told(error)}"
            return Finding(rung.name, 0, size, size, None, None, None, note)
        state.restore()
        where = addresses(subject.model, subject.layers)
        runs = run_prepared(subject, prepared)
        failure = _first_failure(truth, runs, subject.tolerance)
        if failure is None:
            return None
        moved = _moved(where, addresses(subject.model, subject.layers))
        index, wrong = failure
        finding = _located(subject, rung, prepared, state, truth[index], runs[index], index, wrong)
    if rung.name in (PIECEWISE, FULL):
        notes = (finding.note, moved, _history(subject, rung, state, index))
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
    subject: Subject,
    rung: Rung,
    prepared: PreparedModel,
    state: State,
    right: Ran,
    ran: Ran,
    index: int,
    wrong: Wrong | None,
) -> Finding:
    size = subject.steps[index].batch.num_tokens
    finding = Finding(rung.name, index, size, ran.decision.descriptor.num_tokens, None, None, wrong)
    if ran.error is not None:
        return replace(finding, note=f"the step raised {_told(ran.error)}")
    plan = prepared.compiled.plan
    if rung.name == TRACED:
        operator, note = guilty_guard(plan, size)
        return replace(finding, operator=operator, note=note)
    if rung.name == FULL and not ran.calls:
        operator = ", ".join(subject.config.splitting_ops) or None
        return replace(finding, operator=operator, note="right with these ops between the graphs")
    call = guilty_call(right, ran, subject.tolerance)
    if call is not None and call.itself:
        return replace(finding, operator=right.calls[call.index].op)
    use = guilty_piece(plan, call)
    if use is None:
        return finding
    piece = plan.piece_uses()[use]
    note = f"piece {piece} is {plan.pieces[piece].digest[:12]}, use {use}"
    finding = replace(finding, piece=piece, note=note)
    if rung.name == COMPILER:
        state.restore()
        on_rung = replace(subject, config=subject.config.changed(**rung.settings))
        operator = guilty_operator(on_rung, prepared, index, use)
        note = note if operator else f"{note}; compiled by itself it is right"
        return replace(finding, operator=operator, note=note)
    if rung.name == WARM:
        return replace(finding, note=f"{note}; compiled anew it is right: remove its artifact")
    return finding


def _moved(before: dict[str, int], after: dict[str, int]) -> str:
    names = [name for name, place in after.items() if before.get(name) != place]
    return f"moved after the capture: {', '.join(names)}" if names else ""


def _history(subject: Subject, rung: Rung, state: State, index: int) -> str:
    """Whether the step is wrong on its own, or only after those before it."""
    if index == 0:
        return ""
    alone = replace(subject, steps=[subject.steps[index]])
    state.restore()
    truth = run_eagerly(alone)
    finding = _check(alone, rung, state, truth)
    if finding is None:
        return "right as the first step: something of an earlier step is left in rows or state"
    return "wrong as the first step too"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
