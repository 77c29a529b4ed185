"""What a run of the steps gave: results, and what went into and came out of each splitting call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import Decision, ForwardContext, PreparedModel, forward_context
from ...torch_compat.ops import OpOverload, given_arguments, op_name, overload_name
from ...torch_compat.tensors import TorchDispatchMode, tree_leaves
from .case import BisectCase


@dataclass(frozen=True, slots=True)
class Call:
    """One splitting call: copies of what it read, and of all its tensors when it had run.

    What an op writes to is not looked at before: mostly it is memory that nobody has written yet.
    """

    op: str
    before: list[Tensor]
    after: list[Tensor]


@dataclass(slots=True)
class Ran:
    """One step as it ran; `error` is what it raised instead of a result."""

    decision: Decision
    results: list[Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    error: Exception | None = None


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies the tensors of the ops called `names`, wherever they are called from."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._names = names

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = op_name(func)
        if name not in self._names and overload_name(func) not in self._names:
            return func(*args, **kwargs)
        before = copies(_read(func, args, kwargs))
        result = func(*args, **kwargs)
        self.calls.append(Call(name, before, copies((args, kwargs, result))))
        return result


def _read(func: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the op's schema does not say it writes to."""
    return [value for value, written in given_arguments(func, args, kwargs) if not written]


def copies(value: Any) -> list[Tensor]:
    """Copies of the tensors in `value`, in order."""
    return [leaf.detach().clone() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def run_eagerly(case: BisectCase) -> list[Ran]:
    """The truth: the model itself on just the real rows."""
    runs = []
    for step in case.steps:
        decision = step.without_graph()
        metadata = step.metadata_for(decision)
        context = forward_context(ForwardContext(case.layers, metadata))
        calls = _Calls(case.config.splitting_ops)
        with context, torch.no_grad(), calls:
            results = case.model(*step.args, **step.kwargs)
        runs.append(Ran(decision, copies(results), calls.calls))
    return runs


def run_prepared(case: BisectCase, prepared: PreparedModel) -> list[Ran]:
    """The steps through `prepared`, up to the first that raises."""
    runs: list[Ran] = []
    for step in case.steps:
        ran = Ran(prepared.dispatch(step.batch))
        runs.append(ran)
        calls = _Calls(case.config.splitting_ops)
        try:
            metadata = step.metadata_for(ran.decision)
            with calls:
                results = prepared.run(ran.decision, *step.args, metadata=metadata, **step.kwargs)
            ran.results = copies(results)
        except Exception as error:
            ran.error = error
            return runs
        ran.calls = calls.calls
    return runs
