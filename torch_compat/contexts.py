"""Context managers as Dynamo writes them into a graph: a node that enters, a node that exits."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

enter_autocast = _enter_autocast
exit_autocast = _exit_autocast


def is_gradient_switch(target: Any) -> bool:
    """Whether a call of `target` only decides whether gradients are recorded."""
    switches = (_enter_inference_mode, _exit_inference_mode, torch._C._set_grad_enabled)
    return any(target is switch for switch in switches)
