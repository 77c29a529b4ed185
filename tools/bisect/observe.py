"""The record of a run of the steps: results, and inputs and outputs of each splitting call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import Decision, ForwardContext, PreparedModel, forward_context
from ...torch_compat.basics.ops import given_arguments, op_name, overload_name
from ...torch_compat.basics.tensors import LightDispatchMode, tree_leaves
from ..steps import Step
from .case import BisectCase
from .state import ModelState, Moment

if TYPE_CHECKING:
    from ...compile.ir.plan import Plan

BUILT_IN = ("aten", "prims", "prim", "profiler", "inductor", "_c10d_functional")
"""Namespaces of ops that are not observed: custom ops are where graphs are split."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a custom op: copies of what it read, and of all its tensors afterwards.

    Arguments that the op writes to are not copied before: they are mostly uninitialized.
    `buffers` is what pieces may have written by then.
    """

    op: str
    before: list[Tensor]
    after: list[Tensor]
    buffers: Moment


@dataclass(slots=True)
class Ran:
    """One step as it ran; `error` is what it raised instead of a result.

    `inside` is the custom op that raised it. `clobbered` names the state that changed while the
    step was dispatched. `state` is what the step wrote: the rows of each tensor of `before` that
    have an element of `written`, which are those that the uncompiled model writes.
    """

    decision: Decision
    before: Moment
    buffers: Moment
    """The model's buffers before the step."""
    written: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    state: list[Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    error: Exception | None = None
    inside: str | None = None
    clobbered: list[str] = field(default_factory=list)

    @property
    def compared(self) -> list[Tensor]:
        """Results and state."""
        return [*self.results, *self.state]

    def calls_of(self, ops: Collection[str]) -> list[Call]:
        """The calls of the ops called `ops`, in order."""
        return [call for call in self.calls if call.op in ops]


def splitting_ops(plan: Plan) -> set[str]:
    """The overloads at which a plan is split."""
    return {step.op for step in plan.steps if step.kind == "call"}


class OpCalls(LightDispatchMode):
    """Copies the tensors of custom ops, from any caller."""

    sees_inside = True

    def __init__(self, state: ModelState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state
        self.calls: list[Call] = []
        self.inside: str | None = None
        """The op that is running, or that raised."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op_name(func).partition("::")[0] in BUILT_IN:
            return func(*args, **kwargs)
        before, buffers = copies(_read(func, args, kwargs)), self._state.buffers()
        self.inside = overload_name(func)
        result = func(*args, **kwargs)
        self.calls.append(Call(self.inside, before, copies((args, kwargs, result)), buffers))
        self.inside = None
        return result


def _read(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the op's schema does not say it writes to."""
    return [value for value, written in given_arguments(func, args, kwargs) if not written]


def copies(value: Any) -> list[Tensor]:
    """Copies of the tensors in `value`, in order."""
    return [leaf.detach().clone() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def run_observed(
    state: ModelState,
    decision: Decision,
    metadata_for: Callable[[Decision], Any],
    run: Callable[[Any], Any],
    written: list[Tensor] | None = None,
) -> Ran:
    """What `run(metadata)` does; `written` are the elements of the state to compare, by default
    those that it changes."""
    ran, calls = Ran(decision, state.now(), state.buffers()), OpCalls(state)
    try:
        metadata = metadata_for(decision)
        ran.before, ran.buffers = state.now(), state.buffers()  # making it may bind other tensors
        with calls, torch.no_grad():
            ran.results = copies(run(metadata))
    except Exception as error:
        ran.error, ran.inside = error, calls.inside
    ran.calls = calls.calls
    after = ran.before.later()
    ran.written = ran.before.written(after) if written is None else written
    ran.state = after.rows_of(ran.written)
    return ran


def run_model(
    case: BisectCase,
    step: Step,
    state: ModelState,
    trace: AbstractContextManager[Any] | None = None,
) -> Ran:
    """The uncompiled model, in `trace`, on only the real rows of a step."""

    def run(metadata: Any) -> Any:
        with forward_context(ForwardContext(case.layers, metadata)), trace or nullcontext():
            return case.model(*step.args, **step.kwargs)

    return run_observed(state, step.without_graph(), step.metadata_for, run)


def run_eagerly(case: BisectCase, state: ModelState) -> list[Ran]:
    """The expected results: the uncompiled model, up to the first step that raises."""
    runs: list[Ran] = []
    for step in case.steps:
        runs.append(run_model(case, step, state))
        if runs[-1].error is not None:
            break
    return runs


def run_prepared(
    case: BisectCase,
    prepared: PreparedModel,
    state: ModelState,
    right: Sequence[Ran],
    *,
    watch: bool = False,
) -> list[Ran]:
    """The steps through `prepared`, up to the first that raises; `right` are those of the model.

    With `watch`, changes of the state during a dispatch are recorded.
    """
    runs: list[Ran] = []
    for step, want in zip(case.steps, right, strict=False):
        before = state.now() if watch else None
        decision = prepared.dispatch(step.batch)
        changed = before.changed(before.later()) if before is not None else []
        runs.append(run_step(prepared, step, decision, state, want.written))
        runs[-1].clobbered = [f"{name} row {row}" for name, row in changed]
        if runs[-1].error is not None:
            break
    return runs


def run_step(
    prepared: PreparedModel,
    step: Step,
    decision: Decision,
    state: ModelState,
    written: list[Tensor] | None = None,
    metadata_for: Callable[[Decision], Any] | None = None,
) -> Ran:
    """One step through `prepared`."""

    def run(metadata: Any) -> Any:
        return prepared.run(decision, *step.args, metadata=metadata, **step.kwargs)

    return run_observed(state, decision, metadata_for or step.metadata_for, run, written)
