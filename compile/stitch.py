"""From a plan to one straight-line Python function over pieces, weights and splitting ops.

The function takes the user's tensors in the plan's order and returns the results, flat. Pieces,
splitting ops and weights are closure cells, sizes are read once, and every value is deleted right
after its last use, which is what lets a memory pool reuse its block during capture.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .literal import Expr, Ref, decode, refs
from .plan import CallStep, PieceStep, Plan

StepFn = Callable[..., tuple[Any, ...]]
Hook = Callable[[int, Callable[..., Any]], Callable[..., Any]]


def stitch(
    plan: Plan,
    pieces: Sequence[Callable[[list[Any]], Any]],
    weights: Mapping[str, torch.Tensor],
    piece_hook: Hook | None = None,
    call_hook: Hook | None = None,
) -> StepFn:
    """Bind a plan. `weights` maps qualified names to tensors.

    `piece_hook(use, fn)` and `call_hook(use, fn)` may replace the callable of each piece step and
    of each splitting call; that is how a capture puts graph segments around the same code.
    """
    calls = plan.calls()
    bound: dict[str, Any] = {weight.name: weights[weight.target] for weight in plan.weights}
    for use, piece in enumerate(plan.piece_uses()):
        bound[f"p{use}"] = piece_hook(use, pieces[piece]) if piece_hook else pieces[piece]
    for use, call in enumerate(calls):
        op = resolve_op(call.op)
        bound[f"c{use}"] = call_hook(use, op) if call_hook else op
    source, constants = stitched_source(plan)
    bound.update(constants)
    namespace: dict[str, Any] = {}
    exec(compile(source, "<piecegraph stitched>", "exec"), namespace)
    step: StepFn = namespace["link"](**bound)
    return step


def resolve_op(name: str) -> Callable[..., Any]:
    """The operator overload called `ns::op.overload`."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    op: Callable[..., Any] = getattr(
        getattr(getattr(torch.ops, namespace), packet), overload or "default"
    )
    return op


def stitched_source(plan: Plan) -> tuple[str, dict[str, Any]]:
    """Source of `link(...)`, which returns the step function, and the constants it names."""
    writer = _Writer()
    body = [f"{s.name} = {s.source}.size({s.dim})" for s in plan.symbols]
    last = _last_uses(plan)
    piece_use = call_use = 0
    for index, step in enumerate(plan.steps):
        if isinstance(step, PieceStep):
            taken = "".join(f"{out}, " for out in step.outs) + "= " if step.outs else ""
            body.append(f"{taken}p{piece_use}([{', '.join(step.args)}])")
            piece_use += 1
        else:
            body.append(writer.call(f"c{call_use}", step))
            call_use += 1
        if dead := last.get(index):
            body.append(f"del {', '.join(dead)}")
    body.append(f"return ({''.join(f'{result.name}, ' for result in plan.results)})")
    names = [
        *(weight.name for weight in plan.weights),
        *(f"p{use}" for use in range(piece_use)),
        *(f"c{use}" for use in range(call_use)),
        *writer.constants,
    ]
    lines = [
        f"def link({', '.join(names)}):",
        f"    def step({', '.join(item.name for item in plan.inputs)}):",
        *(f"        {line}" for line in body),
        "    return step",
        "",
    ]
    return "\n".join(lines), writer.constants


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
    """Names of the values that a step is given, in order."""
    if isinstance(step, PieceStep):
        return step.args
    return refs([decode(argument) for argument in [*step.args, *step.kwargs.values()]])


class _Writer:
    """Writes splitting calls; what has no literal form becomes a named constant."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}

    def call(self, name: str, step: CallStep) -> str:
        arguments = [self.value(decode(arg)) for arg in step.args]
        arguments += [f"{key}={self.value(decode(arg))}" for key, arg in step.kwargs.items()]
        call = f"{name}({', '.join(arguments)})"
        if not any(step.outs):
            return call
        if not step.unpack:
            return f"{step.outs[0]} = {call}"
        let_go = "" if all(step.outs) else "; del _"
        return f"{', '.join(out or '_' for out in step.outs)}, = {call}{let_go}"

    def value(self, value: Any) -> str:
        match value:
            case Ref() | Expr():
                return str(value)
            case None | bool() | int() | str() if not isinstance(value, enum.Enum):
                return repr(value)
            case list():
                return f"[{', '.join(self.value(item) for item in value)}]"
            case tuple():
                return f"({''.join(self.value(item) + ', ' for item in value)})"
            case slice():
                parts = (value.start, value.stop, value.step)
                return f"slice({', '.join(self.value(part) for part in parts)})"
            case dict() if refs(value):
                items = ", ".join(f"{k!r}: {self.value(v)}" for k, v in value.items())
                return f"{{{items}}}"
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name
