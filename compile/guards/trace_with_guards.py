"""Trace a model and prove the guards of its trace.

Torch's own layout decisions put guards on sizes that the model does not depend on: `reshape` of a
transposed tensor asks whether a size is 1. A trace that fails for that reason is tried once more
with unbacked sizes, for which torch cannot ask; a trace that succeeds there holds for every size.
If that fails too, and the guard fails only for small sizes, these get a trace of their own.

So does each interval of token counts under the policy `split`. A trace serves the sizes around that
of its example, up to where a guard fails; what is left over is traced again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...errors import CompileError, GuardUnproved, SettingsChanged, Specialized, TraceFailed
from ...torch_compat.basics.symbolic import state_equal
from ..ir.compilation import CompileRequest
from ..ir.config import TOKENS, CompileConfig, DynamicShapes, GuardPolicy
from ..trace.dynamo import Trace, trace
from ..trace.examples import example_inputs, example_size
from ..trace.size_asserts import SizeAssert, take_size_asserts
from ..trace.symbols import argument_sizes, symbol_labels
from .prover import GuardProver, interval_around

MAX_INTERVALS = 8
"""Traces of one model, at most."""

OF_GUARDS = GuardUnproved, Specialized
"""Errors of a finished trace: its guards do not hold for all sizes, and another way to trace may
do."""


@dataclass(frozen=True)
class GuardedTrace:
    """A trace, its guards, and the settings with the type of dynamic shapes it was made with."""

    trace: Trace
    guards: GuardProver
    config: CompileConfig
    unproved: GuardUnproved | None = None
    """The guard of an earlier trace, for which this one was made with unbacked sizes."""


def trace_with_guards(request: CompileRequest, attempts: int = 3) -> list[GuardedTrace]:
    """The traces of each call form: one, or one for each interval of token counts, ascending.

    Raises GuardUnproved and Specialized under the policy `prove`, and the errors of `trace`.

    A trace during which another thread changed a setting of torch is of no setting: it is repeated,
    and SettingsChanged after `attempts`.
    """
    request.checkpoint()
    try:
        splits = request.config.guards is GuardPolicy.SPLIT
        guarded: list[GuardedTrace] | CompileError = [
            each for form in request.forms() for each in (_split(form) if splits else _proved(form))
        ]
    except CompileError as error:
        guarded = error
    try:
        request.check_state()
    except SettingsChanged:
        if attempts == 1:
            raise
        return trace_with_guards(request, attempts - 1)
    if isinstance(guarded, CompileError):
        raise guarded
    return guarded


def _proved(request: CompileRequest) -> list[GuardedTrace]:
    """One trace, or several where a guard holds only from some size on."""
    try:
        return [_traced(request)]
    except (TraceFailed, GuardUnproved) as failed:
        return _traced_otherwise(request, failed)


def _traced_otherwise(
    request: CompileRequest, failed: TraceFailed | GuardUnproved
) -> list[GuardedTrace]:
    """A trace with unbacked sizes, or those of intervals; raises `failed` if there are none."""
    guard = failed if isinstance(failed, GuardUnproved) else None
    if request.config.code.dynamic_shapes is not DynamicShapes.UNBACKED:
        try:
            unbacked = _traced(_with(request, DynamicShapes.UNBACKED))
        except CompileError as error:
            if guard is None and isinstance(error, OF_GUARDS):
                raise  # an assertion that fails at the example's size
            request.events.emit("trace.not_unbacked", reason=str(error))
        else:
            request.events.emit("trace.unbacked", reason=str(failed))
            return [replace(unbacked, unproved=guard)]
    if guard is not None and (intervals := _intervals(request, guard)):
        return intervals
    raise failed


def split_instead(
    request: CompileRequest, traces: Sequence[GuardedTrace]
) -> list[GuardedTrace] | None:
    """Traces to use where a compiler cannot compile one with unbacked sizes; None if there are
    none. Inductor, for example, cannot lay out a convolution whose length it may not compare."""
    if not any(each.unproved for each in traces):
        return None
    try:
        return [each for form in request.forms() for each in _split(form, unbacked=False)]
    except CompileError as error:  # the model has been traced: it is no error of its code
        request.events.emit("trace.not_split", reason=str(error))
        return None


def _intervals(request: CompileRequest, unproved: GuardUnproved) -> list[GuardedTrace] | None:
    """The traces for the sizes from which a guard holds, and for smaller ones; None if there are
    none. Mamba models, for example, ask whether there is more than one token.

    Raises other errors of the model's code at some of these sizes, such as HostRead.
    """
    if unproved.facts["symbol"] != TOKENS or unproved.facts["holds_from"] is None:
        return None
    try:
        traces = _split(request, unbacked=False)
    except (*OF_GUARDS, TraceFailed) as error:  # the guard may be an assertion, which fails there
        request.events.emit("trace.not_split", reason=str(error))
        return None
    request.events.emit(
        "trace.intervals",
        level=logging.INFO,
        where=unproved.where,
        condition=str(unproved.facts["expression"]),
        intervals=[each.config.limits(TOKENS) for each in traces],
    )
    return traces


def _split(request: CompileRequest, *, unbacked: bool = True) -> list[GuardedTrace]:
    """The traces that serve the range, each on an interval of token counts. With `unbacked`, one
    with unbacked sizes serves an interval where that is possible.

    Raises GuardUnproved for a guard on anything else, and for more intervals than MAX_INTERVALS.
    """
    request = _with(request, DynamicShapes.BACKED_SIZE_OBLIVIOUS)  # a choice needs a size
    limits = request.config.limits(TOKENS)
    remaining, traces = [limits], list[GuardedTrace]()
    while remaining:
        request.checkpoint()
        low, high = remaining.pop()
        guarded, failed = _around_example(_sized(request, low, high), unbacked)
        traces.append(guarded)
        first, last = guarded.config.limits(TOKENS)
        spans = (low, first - 1), (last + 1, high)
        remaining += [span for span in spans if span[0] <= span[1]]
        if failed is not None and len(traces) + len(remaining) > MAX_INTERVALS:
            bound = f"choose by at most {MAX_INTERVALS} intervals of num_tokens, "
            raise type(failed)(where=failed.where, **failed.facts | {"remedy": bound})
    if len(traces) > 1:
        for guarded in traces:
            if guarded.config.code.dynamic_shapes is not DynamicShapes.UNBACKED:
                guarded.guards.forget_assumptions(*limits)
    return sorted(traces, key=lambda each: each.config.limits(TOKENS))


def _around_example(
    request: CompileRequest, unbacked: bool
) -> tuple[GuardedTrace, GuardUnproved | Specialized | None]:
    """A trace for the interval around its example on which its guards hold, and the error of one
    that does not hold beyond it."""
    traced = trace(request)
    _state_equal_sizes(traced)
    asserts = take_size_asserts(traced)
    size = traced.examples.size_of(TOKENS)
    try:
        return _with_proof(traced, asserts, request), None
    except Specialized as error:
        return _with_proof(traced, asserts, _within(request, size, size)), error
    except GuardUnproved as error:
        unproved = error
    if unbacked:
        try:
            return _traced(_with(request, DynamicShapes.UNBACKED)), None
        except CompileError as error:
            request.events.emit("trace.not_unbacked", reason=str(error))
    checking = replace(request, config=replace(request.config, guards=GuardPolicy.CHECK))
    conditions = [
        each.expression for each in _with_proof(traced, asserts, checking).guards.unproved
    ]
    if any({str(s) for s in each.free_symbols} != {TOKENS} for each in conditions):
        raise unproved
    interval = interval_around(size, conditions, request.config.limits(TOKENS))
    return _with_proof(traced, asserts, _within(request, *interval)), unproved


def _sized(request: CompileRequest, low: int, high: int) -> CompileRequest:
    """`request` for these token counts, with examples of such a size."""
    examples = example_inputs(request.model, request.config, request.device, request.examples)
    if not low <= examples.size_of(TOKENS) <= high:
        others = {examples.size_of(each) for each in examples.symbols.values() if each != TOKENS}
        examples = examples.with_tokens(example_size(low, high, others))
    return replace(_within(request, low, high), examples=examples.call_arguments())


def _within(request: CompileRequest, low: int, high: int) -> CompileRequest:
    """`request` for these token counts."""
    config = request.config
    return replace(
        request,
        config=replace(
            config,
            min_num_tokens=low,
            max_num_tokens=high,
            guards=GuardPolicy.PROVE,
            ranges=tuple(end for end in config.ranges if low <= end < high),
            sizes=tuple(size for size in config.sizes if low <= size <= high),
        ),
    )


def _traced(request: CompileRequest) -> GuardedTrace:
    traced = trace(request)
    _state_equal_sizes(traced)
    asserts = take_size_asserts(traced)
    return _with_proof(traced, asserts, request)


def _with_proof(traced: Trace, asserts: list[SizeAssert], request: CompileRequest) -> GuardedTrace:
    labels = symbol_labels(traced)
    guards = GuardProver(traced.shape_env, labels, request.config, request.events)
    guards.check_symbols()
    guards.prove_new("dynamo", asserts)
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
