"""The memory a prepared model begins with: static inputs, and a ledger of them and the weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...compile.ir.plan import Plan
from ...compile.lower.compiled_model import CompiledModel
from ..check_choice import must_be_one_of
from ..config import Config
from ..step.static_inputs import StaticInputs, StaticInputSpec
from .ledger import MemoryLedger, Owner


def static_inputs(
    compiled: CompiledModel, config: Config, device: torch.device, owned: Mapping[str, Tensor]
) -> StaticInputs:
    """Buffers for every input of the model at its largest size, but for those that the engine owns.

    Raises InvalidSetting for a padding policy of something that is no parameter of the model.
    """
    plan = compiled.plan
    labels = {symbol.name: symbol.label for symbol in plan.symbols}
    specs = []
    for item in plan.inputs:
        name = ".".join(map(str, item.path))
        padding, sentinel = config.padding_of(name)
        specs.append(
            StaticInputSpec(
                name=name,
                dims=tuple(labels[d] if isinstance(d, str) else d for d in item.shape),
                dtype=getattr(torch, item.dtype),
                padding=padding,
                sentinel=sentinel,
                written=item.written,
            )
        )
    _check_names(config, plan)
    limits = {symbol.label: symbol.high for symbol in plan.symbols}
    return StaticInputs(specs, limits, device, owned=owned)


def _check_names(config: Config, plan: Plan) -> None:
    """A parameter that the model does not use may have a policy; a name that is none may not."""
    for name in config.padding:
        parameter, reason = name.partition(".")[0], "the model's forward has no such parameter"
        must_be_one_of(plan.parameters, "padding", parameter, reason)


def opening_ledger(compiled: CompiledModel, inputs: StaticInputs) -> MemoryLedger:
    """Weights and static buffers; the KV cache and workspaces are the engine's to enter."""
    model = compiled.model
    ledger = MemoryLedger()
    ledger.own(
        Owner.WEIGHTS,
        # code that is not traced reads the model's weights itself, any of them
        compiled.weights.values() if compiled.traced else [*model.parameters(), *model.buffers()],
    )
    ledger.own(Owner.STATIC_BUFFERS, inputs.at(inputs.limits).views)
    return ledger
