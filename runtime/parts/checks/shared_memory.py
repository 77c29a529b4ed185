"""Inputs that share memory with something the model writes to.

A graph reads copies of its inputs, and compiled code reads and writes each tensor on its own. So if
an input overlaps another input or a buffer that the model writes to, neither sees the change as the
model itself would.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ....compile.plan.compiled_model import CompiledModel
from ....errors import InputsShareMemory
from ....torch_compat.basics.tensors import inner_tensors, storage_id
from ...backends.ownership import extent
from ...core.check import CheckStep
from ...forward_context import ForwardContext
from .module_state import held_modules

_LARGEST_MASK = 1 << 24


def memory_check(compiled: CompiledModel, seen_written: Collection[str] = ()) -> CheckStep | None:
    """A function that raises InputsShareMemory for the input tensors of a step; None for a model
    that writes to no input and no weight.

    Of code that is not traced, `seen_written` are the weights that a run wrote to.
    """
    inputs = compiled.plan.inputs
    names = [item.label for item in inputs]
    written = [position for position, item in enumerate(inputs) if item.written]
    if compiled.traced:
        changes = {weight.target: weight.written for weight in compiled.plan.weights}
        tensors = compiled.weights
    else:
        tensors = dict(weights_in_reach(compiled.model))
        changes = {name: name in seen_written for name in tensors}
    parts = [
        (*extent(part), name, changes[name], part)
        for name, tensor in tensors.items()
        if changes[name] or written
        for part in inner_tensors(tensor)
        if part.numel()
    ]
    weights = sorted(parts, key=lambda part: part[:3])
    if not weights and not written:
        return None
    starts = [start for start, *_ in weights]
    ends = [end for _, end, *_ in weights]
    furthest = [*accumulate(ends, max)]
    """The end of what begins at the same place or before."""

    def check(context: ForwardContext, tensors: tuple[Tensor, ...]) -> None:
        for position, tensor in enumerate(tensors):
            start, end = extent(tensor)
            at = bisect_left(starts, end) - 1
            while at >= 0 and furthest[at] > start:
                _, _, name, changed, part = weights[at]
                if (changed or position in written) and overlap(tensor, part):
                    raise InputsShareMemory(name=names[position], other=f"{name!r} of the model")
                at -= 1
        for position in written:
            for other, tensor in enumerate(tensors):
                if other != position and overlap(tensors[position], tensor):
                    raise InputsShareMemory(name=names[position], other=f"input {names[other]!r}")

    return check


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by each of their qualified names: a tied one has several."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def weights_in_reach(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Also those of modules that containers hold, which are no submodules."""
    yield from named_weights(model)
    for path, _, module in held_modules(model):
        for name, tensor in own_weights(module):
            yield f"{path}.{name}", tensor


def own_weights(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of one module, without those of its submodules."""
    only: Any = {"recurse": False, "remove_duplicate": False}
    return [*module.named_parameters(**only), *module.named_buffers(**only)]


def overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have an element in common."""
    begin, end = extent(one)
    other_begin, other_end = extent(two)
    if min(end, other_end) <= max(begin, other_begin):
        return False
    elements = (max(end, other_end) - min(begin, other_begin)) // one.element_size()
    comparable = one.dtype == two.dtype and storage_id(one) == storage_id(two)
    if not comparable or elements > _LARGEST_MASK:
        return True
    first = min(one.storage_offset(), two.storage_offset())
    mask = torch.zeros(elements, dtype=torch.bool, device="cpu")
    mask.as_strided(one.size(), one.stride(), one.storage_offset() - first).fill_(True)
    return bool(mask.as_strided(two.size(), two.stride(), two.storage_offset() - first).any())
