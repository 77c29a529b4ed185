"""Tells when a module of a model is given another parameter, buffer or submodule.

Torch calls its registration hooks for each `module.name = ...` in the process: so a replaced
weight is noticed by the next step, and steps pay nothing. It calls none for `weight.data = ...`,
for what `Module.to` puts in place, and for lists: these are noticed when their turn comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .shared_memory import own_weights

_KINDS: tuple[Any, ...] = (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Registrations:
    """Calls `changed` for each registration in a module that `watch` was given, until `close`."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is a method: torch's hooks, which outlive models, do not hold its object."""
        modules = self._watched = WeakSet[nn.Module]()
        method = WeakMethod(changed)

        def hook(module: nn.Module, name: str, value: object) -> None:
            if torch.compiler.is_dynamo_compiling():
                return  # a trace goes through it where a forward makes a list of modules
            if module in modules and (call := method()) is not None:
                call()

        self.close = finalize(self, _remove, [register(hook) for register in _KINDS])

    def watch(self, model: nn.Module) -> None:
        self._watched.update(model.modules())


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def register_again(model: nn.Module) -> None:
    """Set a weight of each module to what it is, which tells other prepared models of it."""
    for module in model.modules():
        for name, tensor in own_weights(module)[:1]:
            setattr(module, name, tensor)
