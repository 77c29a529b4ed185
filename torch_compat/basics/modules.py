"""`torch.nn.Module` below its public surface: hooks, and where a tensor is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as _module

Place = tuple[Any, ...]
"""What a graph reads of a tensor: address, shape, strides and dtype."""

CALL_METHODS = ("_call_impl", "_wrapped_call_impl")
"""What `Module.__call__` runs; Dynamo takes it as constant."""


_TRACERS = ("torch.fx._symbolic_trace", "piecegraph.torch_compat.tracing.other_threads")
"""Modules of what replaces methods of `Module` while a symbolic tracer runs."""


def forward_hooks(module: torch.nn.Module) -> dict[str, list[Any]]:
    """The forward hooks of one module, by kind."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    return {kind: list(vars(module)[kind].values()) for kind in kinds}


def global_forward_hooks() -> list[Any]:
    """Hooks that torch runs around every module."""
    kinds = (_module._global_forward_pre_hooks, _module._global_forward_hooks)
    return [hook for hooks in kinds for hook in hooks.values()]


def called_function(model: torch.nn.Module) -> Any:
    """The function that a call of `model` runs, unbound: its forward, or `__call__` if that is
    replaced or runs hooks. Dynamo traces the same one."""
    call = type(model).__call__
    hooked = any(forward_hooks(model).values()) or global_forward_hooks()
    if hooked or call is not torch.nn.Module.__call__:
        return call
    forward: Any = model.forward
    while isinstance(forward, partial):
        forward = forward.func
    return getattr(forward, "__func__", forward)


def untagged(function: Any) -> Any:
    """What a replaced method of `Module` calls; None for another function.

    Dynamo replaces `__init__` and `__setstate__` in a process for good when it first compiles
    there, symbolic tracers `__call__` and `__getattr__` while they run: ours for one thread alone.
    """
    if not isinstance(function, FunctionType):
        return None
    if function.__globals__.get("__name__") in _TRACERS:
        return vars(function).get("__wrapped__")
    cells = function.__closure__ if function.__module__ == "torch._dynamo.mutation_guard" else None
    return cells[0].cell_contents if cells else None


def original_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside one that `torch.compile` returned; else `model`."""
    inner = vars(model).get("_modules", {}).get("_orig_mod")
    return model if inner is None else inner


@contextmanager
def allocated(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Give the parameters and buffers of `model` that are on the meta device memory on `device`,
    without values, until the block ends. On a CPU what is not written costs no memory."""
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def given(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        result: torch.Tensor = memory.as_subclass(type(tensor))
        result.requires_grad_(tensor.requires_grad)
        vars(result).update(vars(tensor))
        return result

    try:
        for module in model.modules():
            holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in holders:
                for name, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta:
                        before.append((tensors, name, tensor))
                        if id(tensor) not in made:
                            made[id(tensor)] = given(tensor)
                        tensors[name] = made[id(tensor)]
        yield
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor


def tensor_dict(module: torch.nn.Module, name: str) -> dict[str, Any]:
    """The dict of `module` that holds its parameter or buffer `name`."""
    return module._parameters if name in module._parameters else module._buffers


def place_of(tensor: torch.Tensor) -> Place:
    """Where a tensor lies and how it is read there: also whether it is conjugated or negated."""
    views = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, *views


def place_reader(
    module: torch.nn.Module, name: str, address: Callable[[torch.Tensor], int], part: str = ""
) -> Callable[[], Place | None]:
    """A function that reads the place of parameter or buffer `name` by its path from `module`.

    It follows replaced tensors and submodules, and returns None where there is none. `part` is a
    path of attributes to a tensor inside a tensor subclass. One frame: steps call it. Functions of
    torch that a class of parameters replaces are not called, which takes 1 us for each fact.
    """
    *path, leaf = name.split(".")
    owner = module
    for step in path:
        owner = owner._modules[step]  # type: ignore[assignment]
    table = "_parameters" if leaf in owner._parameters else "_buffers"
    held = getattr(owner, table).get(leaf)
    views = isinstance(held, torch.Tensor) and held.dtype.is_complex
    read: Callable[[], Place | None] = _reader_of(len(path), table, part, views)(
        module, address, leaf, *path
    )
    return read


def weight_place(tensor: torch.Tensor, address: Callable[[torch.Tensor], int]) -> Place:
    """What such a function returns where it finds `tensor`."""
    with torch.DisableTorchFunction():
        views = (tensor.is_conj(),) if tensor.is_complex() else ()
        return address(tensor), tensor.shape, tensor.stride(), tensor.dtype, *views


@lru_cache(maxsize=256)
def _reader_of(depth: int, table: str, part: str, views: bool) -> Callable[..., Any]:
    """Makes readers of tensors that are this deep in a module: compiling takes 0.1 ms each. With
    `views` a tensor may be conjugated where it lies."""
    steps = [f"step{index}" for index in range(depth)]
    owners = "".join(f"._modules[{step}]" for step in steps)
    place = f"root{owners}.{table}[leaf]" + (f".{part}" if part else "")
    text = f"""
def reader({", ".join(["root", "address", "leaf", *steps])}):
    def read():
        try:
            t = {place}
            with memory():
                return address(t), t.shape, t.stride(), t.dtype{", t.is_conj()" if views else ""}
        except (KeyError, AttributeError, TypeError):
            return None
    return read
"""
    namespace: dict[str, Any] = {"memory": torch.DisableTorchFunction}
    exec(compile(text, "<piecegraph reader>", "exec"), namespace)
    made: Callable[..., Any] = namespace["reader"]
    return made
