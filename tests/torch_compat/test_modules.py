"""Hooks of modules, and the dict that holds a parameter or buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.torch_compat import modules


def hook(*args: Any) -> None:
    return None


def test_forward_hooks_of_a_module() -> None:
    module = nn.Linear(2, 2)
    assert not any(modules.forward_hooks(module).values())
    module.register_forward_hook(hook)
    module.register_forward_pre_hook(hook)
    assert list(modules.forward_hooks(module).values()) == [[hook], [hook]]


def test_hooks_of_all_modules() -> None:
    before = len(modules.global_forward_hooks())
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert modules.global_forward_hooks()[before:] == [hook]
    finally:
        handle.remove()


def test_replaced_weight_is_read_from_its_dict() -> None:
    module = nn.BatchNorm1d(2)
    weights = modules.tensor_dict(module, "weight")
    buffers = modules.tensor_dict(module, "running_mean")
    module.weight = nn.Parameter(torch.ones(2))
    module.running_mean = torch.ones(2)
    assert weights["weight"] is module.weight
    assert buffers["running_mean"] is module.running_mean
