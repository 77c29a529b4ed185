"""A compiled model: plan, callables of its unique pieces, and the weights they are bound to."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...errors import ModelMismatch
from ...torch_compat.basics.ops import python_for_all_devices
from ..conditions.places import reader
from ..ir.compilation import PieceFn
from ..ir.ops import resolve_op
from ..ir.plan import Plan
from ..ir.serialization import dtype_name
from .codegen import AfterCall, Hook, StepFn, build_step

Kind = tuple[type, torch.device]
"""Class and device of a weight."""

Hooks = Callable[[Plan], tuple[Hook, Hook]]
"""Of a plan the hooks of `build_step`."""


@dataclass(frozen=True)
class CompiledModel:
    """The result of `compile_model`; `from_bundle` if it was loaded and not compiled.

    Its steps are those of one call form, the first unless it is from `forms`.
    """

    plan: Plan
    pieces: tuple[PieceFn, ...]
    """One callable for each artifact that the plan's ranges refer to."""
    weights: Mapping[str, torch.Tensor]
    model: torch.nn.Module
    """The module that owns the weights."""
    from_bundle: bool
    traced: bool = True
    """False if the only piece is the model's own forward."""
    conditions: Mapping[str, Any] | None = None
    """What the trace relied on, as a bundle states it; None without a trace."""
    bundle: str | None = None
    """`Entry.digest` of the bundle that has its code; None if there is none."""
    sources: range = range(0)
    """Numbers of the source texts of graphs that torch keeps for it; see `drop_sources`."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """Class and device of each weight when the code was made or loaded, if it had memory."""

    def __post_init__(self) -> None:
        if not self.kinds:
            loaded = {name: each for name, each in self.weights.items() if not each.is_meta}
            kinds = {name: _kind_of(weight) for name, weight in loaded.items()}
            object.__setattr__(self, "kinds", kinds)

    def relies_on(self, module: str) -> bool:
        """Whether there are conditions on what is in a module of Python."""
        conditions: Any = self.conditions or {"roots": ()}
        return any(module in each["roots"] for each in conditions.get("traces", [conditions]))

    def link(
        self,
        hooks: Hooks | None = None,
        after_call: Callable[[Plan], AfterCall] | None = None,
    ) -> StepFn:
        """The function from the plan's input tensors to its results; see `build_step`.

        With several ranges it chooses by the size it is called with. `hooks` and `after_call` give
        those of each trace.
        """
        steps, ends = [], []
        for plan in self.plan.intervals():
            takes = [[item.path for item in self.plan.inputs].index(i.path) for i in plan.inputs]
            for interval in plan.ranges:
                pieces = [self.pieces[artifact] for artifact in interval.artifacts]
                piece_hook, call_hook = hooks(plan) if hooks else (None, None)
                told = after_call(plan) if after_call else None
                call = build_step(plan, pieces, self.weights, piece_hook, call_hook, told)
                in_order = takes == list(range(len(self.plan.inputs)))
                steps.append(call if in_order else _taking(call, takes))
                ends.append(interval.high)
        if len(steps) == 1:
            return steps[0]
        source, dim = self.plan.token_source()

        def step(*inputs: torch.Tensor) -> tuple[Any, ...]:
            return steps[bisect_left(ends, inputs[source].size(dim))](*inputs)

        return step

    def forms(self) -> list[CompiledModel]:
        """The model once for each call form."""
        plans = (self.plan, *self.plan.forms)
        of_plan = ({w.target: self.weights[w.target] for w in plan.weights} for plan in plans)
        pairs = zip(plans, of_plan, strict=True)
        return [replace(self, plan=plan, weights=weights) for plan, weights in pairs]

    def traces(self) -> list[CompiledModel]:
        """This form of the model once for each trace, for what looks at its steps."""
        return [replace(self, plan=plan) for plan in self.plan.intervals()]

    def opaque_ops(self) -> dict[str, tuple[int, str]]:
        """Operators in Python for every device that its pieces call as they are, by name: calls per
        step in the largest range, and where it is registered. Nothing is fused with such a call.
        Only code of Inductor is known; ahead-of-time libraries are not."""
        plan = self.plan.intervals()[-1]
        artifacts = plan.ranges[-1].artifacts if plan.ranges else ()
        calls = Counter(
            name
            for piece in (plan.piece_uses() if artifacts else ())
            for name in getattr(self.pieces[artifacts[piece]], "ops", ())
        )
        places = {name: python_for_all_devices(resolve_op(name)) for name in calls}
        return {name: (calls[name], place) for name, place in places.items() if place is not None}

    def rebound(self) -> CompiledModel:
        """The same plan and pieces with the model's current weights; raises ModelMismatch."""
        return replace(self, weights=weights_of(self.model, self.plan, self.kinds))

    def misfit(self) -> str | None:
        """A weight that has another form than the code was made for; None if there is none."""
        return _misfit(self.weights, self.plan, self.kinds)


def _taking(step: StepFn, places: Sequence[int]) -> StepFn:
    """`step` for the inputs at `places`."""
    return lambda *inputs: step(*[inputs[place] for place in places])


def weights_of(
    model: torch.nn.Module, plan: Plan, kinds: Mapping[str, Kind] = {}
) -> dict[str, torch.Tensor]:
    """The weights that a plan refers to; raises ModelMismatch if one does not fit, or is of another
    kind than in `kinds`."""
    tensors = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    weights = {}
    for weight in plan.weights:
        tensor = reader(*weight.place, model)() if weight.place else tensors.get(weight.target)
        if not isinstance(tensor, torch.Tensor):
            raise ModelMismatch(reason=f"it has no weight {weight.target!r}")
        weights[weight.target] = tensor
    if fault := _misfit(weights, plan, kinds):
        raise ModelMismatch(reason=fault)
    return weights


def _misfit(
    weights: Mapping[str, torch.Tensor], plan: Plan, kinds: Mapping[str, Kind]
) -> str | None:
    for weight in plan.weights:
        tensor = weights[weight.target]
        with torch.DisableTorchFunction():
            form = dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride()
        expected = weight.dtype, weight.shape, weight.stride
        kind = _kind_of(tensor)
        expected_kind = kinds.get(weight.target, kind)
        if form != expected or kind != expected_kind:
            now, then = _form_text(*form, *kind), _form_text(*expected, *expected_kind)
            return f"{weight.target!r} is {now}, the plan has {then}"
    return None


def _kind_of(tensor: torch.Tensor) -> Kind:
    return type(tensor), tensor.device


def _form_text(dtype: str, shape: Any, stride: Any, kind: type, device: torch.device) -> str:
    return f"a {kind.__name__} {dtype}{list(shape)} with strides {stride} on {device}"
