"""Names of the steps of a plan, for profilers and findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch.profiler import record_function

from ...torch_compat.basics.tensors import without_modes
from ..ir.plan import CallStep, PieceStep, Plan

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def ranged(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` inside a range of this name, which profilers show, and no dispatch mode: a range is an
    operator, and would be one of the graph that is recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        shown: Any = record_function(name)
        with without_modes():
            shown.__enter__()
        try:
            return fn(*args, **kwargs)
        finally:
            with without_modes():
                shown.__exit__(None, None, None)

    return call


def piece_names(plan: Plan) -> list[str]:
    """A name for each use of a piece: `piece 1 layers 6-7`, after the weights that it reads."""
    targets = {weight.name: weight.target for weight in plan.weights}
    return [
        f"piece {step.piece}{_layers(targets.get(name, '') for name in step.args)}"
        for step in plan.steps
        if isinstance(step, PieceStep)
    ]


def call_names(plan: Plan) -> list[str]:
    """A name for each call of a splitting op: `op attention layer 7`, after its text arguments."""
    return [_call_name(step) for step in plan.calls()]


def _call_name(step: CallStep) -> str:
    texts = (each for each in [*step.args, *step.kwargs.values()] if isinstance(each, str))
    return f"op {step.op.rpartition('::')[2].partition('.')[0]}{_layers(texts)}"


def _layers(names: Iterable[str]) -> str:
    """` layer 7` or ` layers 6-7`, by the first number in each dotted name; empty without one."""
    layers = sorted({int(match[1]) for name in names if (match := _NUMBER.search(name))})
    if not layers:
        return ""
    return f" layer {layers[0]}" if len(layers) == 1 else f" layers {layers[0]}-{layers[-1]}"
