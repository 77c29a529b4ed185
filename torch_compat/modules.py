"""`torch.nn.Module` below its public surface: hooks, and where a tensor is stored."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as _module


def forward_hooks(module: torch.nn.Module) -> dict[str, list[Any]]:
    """The forward hooks of one module, by kind."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    return {kind: list(vars(module)[kind].values()) for kind in kinds}


def global_forward_hooks() -> list[Any]:
    """Hooks that torch runs around every module."""
    kinds = (_module._global_forward_pre_hooks, _module._global_forward_hooks)
    return [hook for hooks in kinds for hook in hooks.values()]


def tensor_dict(module: torch.nn.Module, name: str) -> dict[str, Any]:
    """The dict of `module` that holds its parameter or buffer `name`."""
    return module._parameters if name in module._parameters else module._buffers
