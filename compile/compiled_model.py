"""A compiled model: plan, callables of its unique pieces, and the weights they are bound to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ModelMismatch
from .plan import Plan
from .stitch import Hook, StepFn, stitch


@dataclass(frozen=True)
class CompiledModel:
    """What `compile_model` returns; `from_bundle` if nothing was traced or compiled for it."""

    plan: Plan
    pieces: tuple[Callable[[list[Any]], Any], ...]
    weights: Mapping[str, torch.Tensor]
    from_bundle: bool

    def link(self, piece_hook: Hook | None = None, call_hook: Hook | None = None) -> StepFn:
        """The straight-line function from the plan's input tensors to its results; see `stitch`."""
        return stitch(self.plan, self.pieces, self.weights, piece_hook, call_hook)


def bind(
    plan: Plan,
    pieces: Sequence[Callable[[list[Any]], Any]],
    model: torch.nn.Module,
    *,
    from_bundle: bool,
) -> CompiledModel:
    """Bind a plan to the weights of `model`; raises ModelMismatch where one does not fit."""
    tensors = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    weights = {}
    for weight in plan.weights:
        tensor = tensors.get(weight.target)
        if tensor is None:
            raise ModelMismatch(reason=f"it has no weight {weight.target!r}")
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())
        wanted = (weight.dtype, weight.shape, weight.stride)
        if found != wanted:
            raise ModelMismatch(reason=f"{weight.target!r} is {found}, the plan has {wanted}")
        weights[weight.target] = tensor
    return CompiledModel(plan, tuple(pieces), weights, from_bundle)
