"""Generate the step function of a plan: straight-line Python over pieces and splitting ops.

The function takes the user's tensors in the plan's order and returns the flat results. Pieces,
splitting ops and weights are closure variables and sizes are read once. Every value is deleted
after its last use, so that a memory pool can reuse its block during a capture.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...torch_compat.basics.tensors import under_autocast
from ..ir.ops import resolve_op
from ..ir.plan import NUMBER, CallStep, PieceStep, Plan, names_printed
from ..ir.serialization import decode, refs, source

StepFn = Callable[..., tuple[Any, ...]]
Hook = Callable[[int, Callable[..., Any]], Callable[..., Any]]

AfterCall = Callable[[int, Sequence[Any], Sequence[int]], None]
"""Given the position of a splitting call, the results of it that are used, in the order of its
`outs`, and the sizes of the plan's symbols."""

STEP_FILE = "<piecegraph stitched>"
"""The file of the step function in tracebacks."""

_PIECE = re.compile(r"\bp(\d+)\(\[")


def build_step(
    plan: Plan,
    pieces: Sequence[Callable[[list[Any]], Any]],
    weights: Mapping[str, torch.Tensor],
    piece_hook: Hook | None = None,
    call_hook: Hook | None = None,
    after_call: AfterCall | None = None,
) -> StepFn:
    """The step function of `plan`. `weights` maps qualified names to tensors.

    `piece_hook(use, fn)` and `call_hook(use, fn)` may replace the callable of each piece step and
    of each splitting call. A capture uses them to put graph segments around the same code.
    `after_call` is told of the results of each splitting call.
    """
    calls = plan.calls()
    bound: dict[str, Any] = {weight.name: weights[weight.target] for weight in plan.weights}
    for use, piece in enumerate(plan.piece_uses()):
        bound[f"p{use}"] = piece_hook(use, pieces[piece]) if piece_hook else pieces[piece]
    for use, call in enumerate(calls):
        op = resolve_op(call.op)
        if call.autocast is not None:
            op = under_autocast(op, decode(call.autocast))
        bound[f"c{use}"] = call_hook(use, op) if call_hook else op
    text, constants = step_source(plan, told=after_call is not None)
    bound.update(constants)
    if after_call is not None:
        bound["told"] = after_call
    namespace = names_printed() | {"plan": plan}
    exec(compile(text, STEP_FILE, "exec"), namespace)
    step: StepFn = namespace["link"](**bound)
    return step


def failed_piece(error: BaseException) -> int | None:
    """The piece step of a plan that `error` was raised in; None for any other place."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == STEP_FILE:
            lines = step_source(frame.f_globals["plan"])[0].splitlines()
            called = _PIECE.search(lines[line - 1])
            return int(called[1]) if called else None
    return None


def step_source(plan: Plan, told: bool = False) -> tuple[str, dict[str, Any]]:
    """Source of `link(...)`, which returns the step function, and the constants it refers to.

    With `told` that function is told of results, in the lines of the calls.
    """
    sizes = "".join(f"{symbol.name}, " for symbol in plan.symbols)
    constants: dict[str, Any] = {}
    body = [
        f"{s.name} = {s.source}" if s.dim == NUMBER else f"{s.name} = {s.source}.size({s.dim})"
        for s in plan.symbols
    ]
    last = _last_uses(plan)
    piece_use = call_use = 0
    for index, step in enumerate(plan.steps):
        if isinstance(step, PieceStep):
            taken = "".join(f"{out}, " for out in step.outs) + "= " if step.outs else ""
            body.append(f"{taken}p{piece_use}([{', '.join(step.args)}])")
            piece_use += 1
        else:
            call = _call(f"c{call_use}", step, constants)
            if told and any(step.forms):
                results = "".join(f"{out}, " for out in step.outs)
                call += f"; told({call_use}, ({results}), ({sizes}))"
            body.append(call)
            call_use += 1
        if dead := last.get(index):
            body.append(f"del {', '.join(dead)}")
    body.append(f"return ({''.join(f'{result.name}, ' for result in plan.results)})")
    names = [
        *(weight.name for weight in plan.weights),
        *(f"p{use}" for use in range(piece_use)),
        *(f"c{use}" for use in range(call_use)),
        *constants,
        *(["told"] if told else []),
    ]
    lines = [
        f"def link({', '.join(names)}):",
        f"    def step({', '.join(item.name for item in plan.inputs)}):",
        *(f"        {line}" for line in body),
        "    return step",
        "",
    ]
    return "\n".join(lines), constants


def _last_uses(plan: Plan) -> dict[int, list[str]]:
    """Intermediate values to delete after each step."""
    kept = {result.name for result in plan.results}
    last: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        for name in [*used(step), *(out for out in step.outs if out)]:
            if name.startswith("t") and name not in kept:
                last[name] = index
    dead: dict[int, list[str]] = {}
    for name, index in last.items():
        dead.setdefault(index, []).append(name)
    return dead


def used(step: PieceStep | CallStep) -> Sequence[str]:
    """Names of the values that a step takes, in order."""
    if isinstance(step, PieceStep):
        return step.args
    return refs([decode(argument) for argument in [*step.args, *step.kwargs.values()]])


def _call(name: str, step: CallStep, constants: dict[str, Any]) -> str:
    """A splitting call as a statement."""
    arguments = [source(decode(arg), constants) for arg in step.args]
    arguments += [f"{key}={source(decode(arg), constants)}" for key, arg in step.kwargs.items()]
    call = f"{name}({', '.join(arguments)})"
    if not any(step.outs):
        return call
    if not step.unpack:
        return f"{step.outs[0]} = {call}"
    drop = "" if all(step.outs) else "; del _"
    return f"{', '.join(out or '_' for out in step.outs)}, = {call}{drop}"
