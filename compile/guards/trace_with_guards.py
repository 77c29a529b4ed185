"""Trace a model and prove the guards of its trace.

Torch's own layout decisions put guards on sizes that the model does not depend on: `reshape` of a
transposed tensor asks whether a size is 1. A trace that fails for that reason is tried once more
with unbacked sizes, for which torch cannot ask; a trace that succeeds there holds for every size.
If that fails too, and the guard fails only for small sizes, smaller batches are padded.

Under the policy `split` there is no padding but one trace for each interval of token counts on
which its guards hold. A trace serves the sizes around that of its example, up to where a guard
fails; what is left over is traced again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import CompileError, GuardUnproved, SettingsChanged, Specialized, TraceFailed
from ...torch_compat.basics.symbolic import state_equal
from ..ir.compilation import CompileRequest
from ..ir.config import TOKENS, CompileConfig, DynamicShapes, GuardPolicy
from ..trace.dynamo import Trace, trace
from ..trace.examples import example_inputs, example_size
from ..trace.size_asserts import SizeAssert, take_size_asserts
from ..trace.symbols import argument_sizes, symbol_labels
from .low_end import padding_difference
from .prover import GuardProver, interval_around

MAX_INTERVALS = 8
"""Traces of one model, at most."""


@dataclass(frozen=True)
class GuardedTrace:
    """A trace, its guards, and the settings with the type of dynamic shapes it was made with."""

    trace: Trace
    guards: GuardProver
    config: CompileConfig
    unproved: GuardUnproved | None = None
    """The guard of an earlier trace, for which this one was made with unbacked sizes."""


def trace_with_guards(request: CompileRequest, attempts: int = 3) -> list[GuardedTrace]:
    """One trace of each call form; under the policy `split` one for each interval of token counts,
    ascending.

    Raises GuardUnproved and Specialized under the policy `prove`, and the errors of `trace`.

    A trace during which another thread changed a setting of torch is of no setting: it is repeated,
    and SettingsChanged after `attempts`.
    """
    request.checkpoint()
    try:
        splits = request.config.guards is GuardPolicy.SPLIT
        guarded: list[GuardedTrace] | CompileError = [
            each
            for form in request.forms()
            for each in (_split(form) if splits else [_proved(form)])
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


def _proved(request: CompileRequest) -> GuardedTrace:
    is_unbacked = request.config.code.dynamic_shapes is DynamicShapes.UNBACKED
    try:
        return _traced(request)
    except TraceFailed as failed:
        if is_unbacked:
            raise
        try:
            return _traced(_with(request, DynamicShapes.UNBACKED))
        except (GuardUnproved, Specialized):  # an assertion that fails at the example's size
            raise
        except CompileError:
            raise failed from failed.__cause__
    except GuardUnproved as unproved:
        if is_unbacked:
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


def padded_instead(
    request: CompileRequest, traces: Sequence[GuardedTrace]
) -> list[GuardedTrace] | None:
    """Traces to use where a compiler cannot compile one with unbacked sizes; None if there are
    none. Inductor, for example, cannot lay out a convolution whose length it may not compare."""
    if not any(each.unproved for each in traces):
        return None
    padded = [
        _padded_trace(form, each.unproved) if each.unproved else each
        for form, each in zip(request.forms(), traces, strict=True)
    ]
    return [each for each in padded if each] if all(padded) else None


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


def _split(request: CompileRequest) -> list[GuardedTrace]:
    """The traces that serve the range, each on an interval of token counts.

    Raises GuardUnproved for a guard on anything else, and for more intervals than MAX_INTERVALS.
    """
    request = _with(request, DynamicShapes.BACKED_SIZE_OBLIVIOUS)  # a choice needs a size
    limits = request.config.limits(TOKENS)
    remaining, traces = [limits], list[GuardedTrace]()
    while remaining:
        request.checkpoint()
        low, high = remaining.pop()
        guarded, failed = _around_example(_sized(request, low, high))
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
    request: CompileRequest,
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
    try:
        return _traced(_with(request, DynamicShapes.UNBACKED)), None
    except CompileError:
        pass
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
