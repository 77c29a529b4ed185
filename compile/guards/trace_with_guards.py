"""Trace a model and prove the guards of its trace.

Torch's own layout decisions put guards on sizes that the model does not depend on: `reshape` of a
transposed tensor asks whether a size is 1. A trace that fails for that reason is tried once more
with unbacked sizes, for which torch cannot ask; a trace that succeeds there holds for every size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...errors import CompileError, GuardUnproved
from ...torch_compat.symbolic import state_equal
from ..ir.compilation import CompileRequest
from ..ir.config import CompileConfig, DynamicShapes
from ..trace.dynamo import Trace, trace
from ..trace.size_asserts import take_size_asserts
from ..trace.symbols import argument_sizes, symbol_labels
from .prover import GuardProver


@dataclass(frozen=True)
class GuardedTrace:
    """A trace, its guards, and the settings with the type of dynamic shapes it was made with."""

    trace: Trace
    guards: GuardProver
    config: CompileConfig


def trace_with_guards(request: CompileRequest) -> GuardedTrace:
    """Raises GuardUnproved and Specialized under the policy `prove`, and the errors of `trace`."""
    try:
        return _traced(request)
    except GuardUnproved as unproved:
        if request.config.dynamic_shapes is DynamicShapes.UNBACKED:
            raise
        try:
            found = _traced(_with(request, DynamicShapes.UNBACKED))
        except CompileError:
            raise unproved from None
        request.events.emit("trace.unbacked", reason=str(unproved))
        return found


def _traced(request: CompileRequest) -> GuardedTrace:
    traced = trace(request)
    _state_equal_sizes(traced)
    labels = symbol_labels(traced)
    guards = GuardProver(traced.shape_env, labels, request.config, request.events)
    guards.check_symbols()
    guards.prove_new("dynamo", take_size_asserts(traced.graph.graph, labels))
    if request.config.dynamic_shapes is DynamicShapes.BACKED:
        # Dynamo assumes that a backed size is at least 2 and records no guard for it. A second
        # trace without the assumption yields the guards that are missing here.
        oblivious = _traced(_with(request, DynamicShapes.BACKED_SIZE_OBLIVIOUS))
        guards.unproved += oblivious.guards.unproved
    return GuardedTrace(traced, guards, request.config)


def _state_equal_sizes(traced: Trace) -> None:
    """Sizes declared by one name become one symbol, also where the model never compares them."""
    first: dict[str, torch.SymInt] = {}
    for leaf, dim, size in argument_sizes(traced):
        if label := traced.examples.symbols.get((leaf.label, dim)):
            state_equal(size, first.setdefault(label, size))


def _with(request: CompileRequest, shapes: DynamicShapes) -> CompileRequest:
    return replace(request, config=request.config.model_copy(update={"dynamic_shapes": shapes}))
