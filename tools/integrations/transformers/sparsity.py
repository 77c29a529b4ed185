"""Activation sparsity of Gemma 3n, with its threshold computed before a trace.

The model asks `torch.distributions` for a number of its configuration in each call, which Dynamo
does not trace.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

METHOD = "_gaussian_topk"


def settle_sparsity(model: nn.Module) -> None:
    """Let each sparse layer of `model` use a number for its threshold. Idempotent."""
    module: Any
    for module in model.modules():
        if hasattr(module, METHOD) and module.activation_sparsity > 0:
            share = torch.tensor(module.activation_sparsity, dtype=torch.float32)
            deviations = torch.special.ndtri(share).to(next(module.parameters()).dtype)
            module.deviations = float(deviations)
            setattr(module, METHOD, MethodType(_above_threshold, module))


def _above_threshold(module: Any, inputs: Tensor) -> Tensor:
    """What `inputs` (…, width) have above their mean by `deviations` standard deviations."""
    mean = inputs.mean(-1, keepdim=True)
    deviation = inputs.std(-1, keepdim=True, unbiased=False)
    return torch.relu(inputs - (mean + deviation * module.deviations))
