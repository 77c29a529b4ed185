"""Trace a model and prove the guards of its trace.

Torch's own layout decisions put guards on sizes that the model does not depend on: `reshape` of a
transposed tensor asks whether a size is 1. A trace that fails for that reason is tried once more
with unbacked sizes, for which torch cannot ask; a trace that succeeds there holds for every size.
If that fails too, and the guard fails only for small sizes, smaller batches are padded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import CompileError, GuardUnproved
from ...torch_compat.basics.settings import global_state
from ...torch_compat.basics.symbolic import state_equal
from ..ir.compilation import CompileRequest
from ..ir.config import TOKENS, CompileConfig, DynamicShapes
from ..trace.dynamo import Trace, trace
from ..trace.size_asserts import take_size_asserts
from ..trace.symbols import argument_sizes, symbol_labels
from .low_end import padding_difference
from .prover import GuardProver


@dataclass(frozen=True)
class GuardedTrace:
    """A trace, its guards, and the settings with the type of dynamic shapes it was made with."""

    trace: Trace
    guards: GuardProver
    config: CompileConfig
    unproved: GuardUnproved | None = None
    """The guard of an earlier trace, for which this one was made with unbacked sizes."""


def trace_with_guards(request: CompileRequest, attempts: int = 3) -> GuardedTrace:
    """Raises GuardUnproved and Specialized under the policy `prove`, and the errors of `trace`.

    A trace during which another thread changed a setting of torch is of no setting: it is repeated.
    """
    before = global_state()
    try:
        guarded: GuardedTrace | CompileError = _proved(request)
    except CompileError as error:
        guarded = error
    if global_state() != before and attempts > 1:
        return trace_with_guards(request, attempts - 1)
    if isinstance(guarded, CompileError):
        raise guarded
    return guarded


def _proved(request: CompileRequest) -> GuardedTrace:
    try:
        return _traced(request)
    except GuardUnproved as unproved:
        if request.config.code.dynamic_shapes is DynamicShapes.UNBACKED:
            if (padded := _padded_trace(request, unproved)) is None:
                raise
            return padded
        try:
            unbacked = _traced(_with(request, DynamicShapes.UNBACKED))
        except CompileError:
            padded = _padded_trace(request, unproved)
            if padded is None:
                raise unproved from None
            return padded
        request.events.emit("trace.unbacked", reason=str(unproved))
        return replace(unbacked, unproved=unproved)


def padded_instead(request: CompileRequest, guarded: GuardedTrace) -> GuardedTrace | None:
    """A trace to use where a compiler cannot compile one with unbacked sizes; None if there is
    none. Inductor, for example, cannot lay out a convolution whose length it may not compare."""
    return None if guarded.unproved is None else _padded_trace(request, guarded.unproved)


def _padded_trace(request: CompileRequest, unproved: GuardUnproved) -> GuardedTrace | None:
    """A trace for the sizes from which the guards hold; None if padding up to them is not right."""
    model, config, low, guarded = request.model, request.config, _low_end(unproved), None
    while low is not None and guarded is None:
        raised = replace(request, config=replace(config, min_num_tokens=low))
        try:
            guarded = _traced(raised)
        except GuardUnproved as other:
            low = _low_end(other)
        except CompileError:
            return None
    if guarded is None or low is None:
        return None
    below = range(config.min_num_tokens, low)
    sizes = iter(sorted({*below[:3], *below[-1:]}))
    fault = padding_difference(model, guarded.trace, config, sizes, low)
    facts: dict[str, Any] = {"min_num_tokens": low, "condition": str(unproved.facts["expression"])}
    if fault is not None:
        request.events.emit("low_end.refused", where=unproved.where, reason=fault, **facts)
        return None
    request.events.emit("low_end", level=logging.WARNING, where=unproved.where, **facts)
    return guarded


def _low_end(unproved: GuardUnproved) -> int | None:
    """The number of tokens from which a guard on it holds; None for a guard on anything else."""
    low: int | None = unproved.facts["holds_from"]
    return low if unproved.facts["symbol"] == TOKENS else None


def _traced(request: CompileRequest) -> GuardedTrace:
    traced = trace(request)
    _state_equal_sizes(traced)
    labels = symbol_labels(traced)
    guards = GuardProver(traced.shape_env, labels, request.config, request.events)
    guards.check_symbols()
    guards.prove_new("dynamo", take_size_asserts(traced.graph.graph, labels))
    if request.config.code.dynamic_shapes is DynamicShapes.BACKED:
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
    code = replace(request.config.code, dynamic_shapes=shapes)
    return replace(request, config=replace(request.config, code=code))
