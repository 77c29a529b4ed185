"""The record of a run of the steps: results, and inputs and outputs of each splitting call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import Decision, ForwardContext, PreparedModel, forward_context
from ...torch_compat.basics.ops import given_arguments, op_name, overload_name
from ...torch_compat.basics.tensors import TorchDispatchMode, tree_leaves
from ..steps import Step
from .case import BisectCase
from .state import State

if TYPE_CHECKING:
    from ...compile.ir.plan import Plan

BUILT_IN = ("aten", "prims", "prim", "profiler", "inductor", "_c10d_functional")
"""Namespaces of ops that are not observed: custom ops are where graphs are split."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a custom op: copies of what it read, and of all its tensors afterwards.

    Arguments that the op writes to are not copied before: they are mostly uninitialized.
    """

    op: str
    before: list[Tensor]
    after: list[Tensor]


@dataclass(slots=True)
class Ran:
    """One step as it ran; `error` is what it raised instead of a result.

    `inside` is the custom op that raised it. `clobbered` names the state that changed while the
    step was dispatched.
    """

    decision: Decision
    results: list[Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    error: Exception | None = None
    inside: str | None = None
    clobbered: list[str] = field(default_factory=list)

    def calls_of(self, ops: Collection[str]) -> list[Call]:
        """The calls of the ops called `ops`, in order."""
        return [call for call in self.calls if call.op in ops]


def splitting_ops(plan: Plan) -> set[str]:
    """The overloads at which a plan is split."""
    return {step.op for step in plan.steps if step.kind == "call"}


class OpCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies the tensors of custom ops, from any caller."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.inside: str | None = None
        """The op that is running, or that raised."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op_name(func).partition("::")[0] in BUILT_IN:
            return func(*args, **kwargs)
        before = copies(_read(func, args, kwargs))
        self.inside = overload_name(func)
        result = func(*args, **kwargs)
        self.calls.append(Call(self.inside, before, copies((args, kwargs, result))))
        self.inside = None
        return result


def _read(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the op's schema does not say it writes to."""
    return [value for value, written in given_arguments(func, args, kwargs) if not written]


def copies(value: Any) -> list[Tensor]:
    """Copies of the tensors in `value`, in order."""
    return [leaf.detach().clone() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def run_eagerly(case: BisectCase) -> list[Ran]:
    """The eager model on only the real rows: the expected results."""
    runs = []
    for step in case.steps:
        decision = step.without_graph()
        metadata = step.metadata_for(decision)
        context = forward_context(ForwardContext(case.layers, metadata))
        calls = OpCalls()
        with context, torch.no_grad(), calls:
            results = case.model(*step.args, **step.kwargs)
        runs.append(Ran(decision, copies(results), calls.calls))
    return runs


def run_prepared(
    case: BisectCase, prepared: PreparedModel, *, state: State | None = None
) -> list[Ran]:
    """The steps through `prepared`, up to the first that raises.

    With `state`, changes to it during a dispatch are recorded.
    """
    runs: list[Ran] = []
    for step in case.steps:
        before = state.contents() if state is not None else None
        decision = prepared.dispatch(step.batch)
        clobbered = state.changed_since(before) if state is not None and before is not None else []
        runs.append(run_step(prepared, step, decision))
        runs[-1].clobbered = clobbered
        if runs[-1].error is not None:
            break
    return runs


def run_step(prepared: PreparedModel, step: Step, decision: Decision) -> Ran:
    """One step through `prepared`."""
    ran, calls = Ran(decision), OpCalls()
    try:
        metadata = step.metadata_for(decision)
        with calls:
            results = prepared.run(decision, *step.args, metadata=metadata, **step.kwargs)
        ran.results = copies(results)
    except Exception as error:
        ran.error, ran.inside = error, calls.inside
    ran.calls = calls.calls
    return ran
