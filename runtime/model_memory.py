"""The memory a prepared model begins with: static inputs, and a ledger of them and the weights."""

from __future__ import annotations

import torch

from ..compile.compiled_model import CompiledModel
from .config import Config
from .memory_ledger import MemoryLedger, Owner
from .static_inputs import InputSpec, Padding, StaticInputs


def static_inputs(compiled: CompiledModel, config: Config, device: torch.device) -> StaticInputs:
    """Buffers for every input of the model at its largest size."""
    labels = {symbol.name: symbol.label for symbol in compiled.plan.symbols}
    specs = [
        InputSpec(
            name=".".join(map(str, item.path)),
            dims=tuple(labels[d] if isinstance(d, str) else d for d in item.shape),
            dtype=getattr(torch, item.dtype),
            padding=Padding.ZERO,
        )
        for item in compiled.plan.inputs
    ]
    limits = {symbol.label: config.limits(symbol.label)[1] for symbol in compiled.plan.symbols}
    return StaticInputs(specs, limits, device)


def opening_ledger(compiled: CompiledModel, inputs: StaticInputs, config: Config) -> MemoryLedger:
    """Weights and static buffers; the KV cache and workspaces are the engine's to enter."""
    ledger = MemoryLedger()
    ledger.own(Owner.WEIGHTS, compiled.weights.values())
    limits = {symbol.label: config.limits(symbol.label)[1] for symbol in compiled.plan.symbols}
    ledger.own(Owner.STATIC_BUFFERS, inputs.at(limits).views)
    return ledger
