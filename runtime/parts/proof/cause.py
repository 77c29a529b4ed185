"""What shares the cause of a wrong step, found by running it in lower modes."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from ....compile.ir.config import TOKENS
from ....dispatch import NO_GRAPH, RuntimeMode
from .step_runs import PADDED_CODE, PADDED_MODEL, KeptStep, StepRuns, as_it_is


class Cause(StrEnum):
    """What is out of service after a wrong step, in order of size: the largest set that shares its
    cause."""

    NOTHING = "nothing"
    GRAPH = "graph"
    MODE = "graphs of the mode"
    GRAPHS = "all graphs"
    CODE = "compiled code"
    BUNDLE = "bundle"


def find_cause(
    runs: StepRuns, step: KeptStep, expected: Any, is_traced: bool
) -> tuple[Cause, list[int]]:
    """The largest set that shares the cause of a wrong step, and its graphs by index; `expected` is
    what the model gives."""
    decision, mode, captured = step.decision, step.decision.mode, runs.graphs()
    every = [index for index, _, _ in captured]
    if not runs.is_right(step, NO_GRAPH, expected):
        return (Cause.CODE if is_traced else Cause.NOTHING), every
    if mode is RuntimeMode.NONE:
        return Cause.NOTHING, []  # wrong once
    if decision.descriptor.num_tokens != step.num_tokens:
        if not runs.is_right(step, PADDED_MODEL, expected):
            return Cause.GRAPHS, every  # padding reaches real rows
        if not runs.is_right(step, PADDED_CODE, expected):
            return Cause.CODE, every
    padded, alike = runs.padded_sizes(decision), runs.graphs(decision.descriptor.axes)
    for index, other, sizes in alike:
        lower = mode is RuntimeMode.FULL and other is RuntimeMode.PIECEWISE and sizes == padded
        if lower and not runs.is_right(step, index, expected):
            return Cause.GRAPHS, every
    rebuilt = step.metadata is None or runs.rebuild is not as_it_is
    for index, other, sizes in alike:
        another = other is mode and index != decision.graph_index
        fits = sizes[TOKENS] >= step.num_tokens
        if rebuilt and another and fits and runs.is_right(step, index, expected):
            return Cause.GRAPH, [decision.graph_index]
    return Cause.MODE, [index for index, other, _ in captured if other is mode]
