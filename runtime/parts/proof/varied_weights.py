"""Weights with other values where theirs hide what values that are loaded later would show.

What is multiplied by a zero, or by what a weight is apart from one, as a gate before it is trained,
reaches no row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...core.preserved import WHOLE


def varied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of `weights` in which a zero or a one may hide something, with random values for both.

    Of buffers only one that holds nothing else, as one with zeros and ones may be a mask. Of a
    large parameter only one with a whole row or column of them, as others show what one hides: a
    trained model has not the memory for a copy of each matrix.
    """
    found = dict[str, Tensor]()
    for name, weight in weights.items():
        if any_values(weight) or (is_plain(weight) and weight.nbytes <= WHOLE):
            tensor = weight.detach()
            zeros, ones = tensor == 0, tensor == 1
            alike = zeros.all() | ones.all()
            if alike or (any_values(weight) and _hides(zeros | ones, weight.nbytes > WHOLE)):
                found[name] = _filled(tensor, zeros, ones)
    return found


def _hides(neutral: Tensor, is_large: bool) -> bool:
    if not is_large or neutral.dim() < 2:
        return bool(neutral.any())
    rows = neutral.flatten(1)
    return bool(rows.all(1).any() | rows.all(0).any())


def any_values(weight: Tensor) -> bool:
    """Whether `weight` may be given any values."""
    return isinstance(weight, torch.nn.Parameter) and is_plain(weight)


def is_plain(weight: Tensor) -> bool:
    """Whether each element is a float of its own of more than 8 bits."""
    plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.is_floating_point()
    return plain and weight.itemsize > 1 and weight.numel() > 0 and all(weight.stride())


def _filled(tensor: Tensor, zeros: Tensor, ones: Tensor) -> Tensor:
    """With random values in the strides of `tensor`; with zeros such as a layer begins with."""
    generator = torch.Generator(tensor.device).manual_seed(0)
    random = torch.rand(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)
    random += 0.5
    small = random / math.sqrt(math.prod(tensor.shape[1:]))
    filled = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return filled.copy_(torch.where(zeros, small, torch.where(ones, random, tensor)))


@contextmanager
def in_place_of(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Give `weights` the memory of `others` of the same names."""
    own = {name: weights[name].data for name in others}
    try:
        for name, other in others.items():
            weights[name].data = other
        yield
    finally:
        for name, data in own.items():
            weights[name].data = data
