"""A trace whose guards all hold, or are treated as the policy says.

Torch's own layout decisions put guards on sizes that the model does not depend on: `reshape` of a
transposed tensor asks whether a size is 1. A trace that is refused is therefore tried once more
with unbacked sizes, which allow no such question; what passes there is right for every size.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import CompileError, GuardUnproved
from ..ir.config import CompileConfig, DynamicShapes
from ..ir.request import Task
from ..trace.dynamo import Trace, trace
from ..trace.size_asserts import take_size_asserts
from ..trace.symbols import argument_sizes, symbol_labels
from .prover import GuardBook


def sound_trace(task: Task) -> tuple[Trace, GuardBook, CompileConfig]:
    """The trace, its guards, and the settings with the type of dynamic shapes it was made with.

    Raises GuardUnproved and Specialised under the policy `prove`, and the errors of `trace`.
    """
    try:
        return _settled(task)
    except GuardUnproved as refusal:
        if task.config.dynamic_shapes is DynamicShapes.UNBACKED:
            raise
        try:
            found = _settled(_with(task, DynamicShapes.UNBACKED))
        except CompileError:
            raise refusal from None
        task.events.emit("trace.unbacked", reason=str(refusal))
        return found


def _settled(task: Task) -> tuple[Trace, GuardBook, CompileConfig]:
    traced = trace(task)
    _state_equal_sizes(traced)
    labels = symbol_labels(traced)
    book = GuardBook(traced.shape_env, labels, task.config, task.events)
    book.check_symbols()
    book.settle("dynamo", take_size_asserts(traced.graph.graph, labels, traced.shape_env))
    if task.config.dynamic_shapes is DynamicShapes.BACKED:
        # Dynamo takes a backed size to be at least 2 and leaves no guard for that: trace once
        # more without the assumption, only for the guards which that brings to light.
        book.unproved += _settled(_with(task, DynamicShapes.BACKED_SIZE_OBLIVIOUS))[1].unproved
    return traced, book, task.config


def _state_equal_sizes(traced: Trace) -> None:
    """Sizes declared by one name are one symbol, also those that never met in the model."""
    first: dict[str, torch.SymInt] = {}
    for leaf, dim, size in argument_sizes(traced):
        if label := traced.examples.symbols.get((leaf.label, dim)):
            torch._check(size == first.setdefault(label, size))  # type: ignore[no-untyped-call]


def _with(task: Task, shapes: DynamicShapes) -> Task:
    return replace(task, config=task.config.model_copy(update={"dynamic_shapes": shapes}))
