"""Inputs that share memory with something the model writes to.

A graph reads copies of its inputs, and compiled code reads and writes each tensor on its own. So if
an input overlaps another input or a buffer that the model writes to, neither sees the change as the
model itself would.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import torch
from torch import Tensor

from ...compile.lower.compiled_model import CompiledModel
from ...errors import InputsShareMemory
from ...torch_compat.tensors import inner_tensors, storage_id

_LARGEST_MASK = 1 << 24


def memory_check(compiled: CompiledModel) -> Callable[[tuple[Tensor, ...]], None] | None:
    """A function that raises InputsShareMemory for the input tensors of a step; None for a model
    that writes to no input and no weight."""
    inputs = compiled.plan.inputs
    names = [item.label for item in inputs]
    written = [position for position, item in enumerate(inputs) if item.written]
    weights = sorted(
        (part.data_ptr(), weight.target, weight.written, part)
        for weight in compiled.plan.weights
        if weight.written or written
        for part in inner_tensors(compiled.weights[weight.target])
        if part.numel()
    )
    if not weights and not written:
        return None
    starts = [start for start, *_ in weights]

    def check(tensors: tuple[Tensor, ...]) -> None:
        for position, tensor in enumerate(tensors):
            at = bisect_right(starts, tensor.data_ptr()) - 1
            if at >= 0:
                _, target, changes, part = weights[at]
                if (changes or position in written) and overlap(tensor, part):
                    raise InputsShareMemory(name=names[position], other=f"{target!r} of the model")
        for position in written:
            for other, tensor in enumerate(tensors):
                if other != position and overlap(tensors[position], tensor):
                    raise InputsShareMemory(name=names[position], other=f"input {names[other]!r}")

    return check


def overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have an element in common."""
    begin, end = _bounds(one)
    other_begin, other_end = _bounds(two)
    if min(end, other_end) <= max(begin, other_begin):
        return False
    elements = (max(end, other_end) - min(begin, other_begin)) // one.element_size()
    comparable = one.dtype == two.dtype and storage_id(one) == storage_id(two)
    if not comparable or elements > _LARGEST_MASK:
        return True
    first = min(one.storage_offset(), two.storage_offset())
    mask = torch.zeros(elements, dtype=torch.bool)
    mask.as_strided(one.size(), one.stride(), one.storage_offset() - first).fill_(True)
    return bool(mask.as_strided(two.size(), two.stride(), two.storage_offset() - first).any())


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """Address of the first byte, and of the one after the last."""
    if not tensor.numel():
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
