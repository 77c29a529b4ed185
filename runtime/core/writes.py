"""What a step writes to its static inputs: in one launch for copies, in one for padding of zeros.

torch launches one kernel for dense tensors of one dtype and of equal strides, and one for each
tensor if they differ. So on a device, tensors of several dtypes are written as integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ...torch_compat.basics.tensors import copy_all, zero_all

Write = Callable[[tuple[Tensor, ...]], object]
"""A function of all inputs of a step."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class PaddingParts:
    """Parts of static inputs that are set to zero, or to the content of other tensors."""

    zeros: list[Tensor] = field(default_factory=list)
    constants: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Dense; written in the launch of the copies."""
    others: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Written after the copies, whose last rows they can read."""

    def __add__(self, more: PaddingParts) -> PaddingParts:
        constants, others = self.constants + more.constants, self.others + more.others
        return PaddingParts(self.zeros + more.zeros, constants, others)

    def after_copies(self, copies: Sequence[tuple[int, Tensor]]) -> tuple[Write, ...]:
        """Functions that copy the inputs at positions to tensors, and write this padding."""
        positions, targets, writes = list[int](), list[Tensor](), list[Write]()
        for position, target in copies:
            if target.dim() and target.is_contiguous():
                positions.append(position)
                targets.append(target.flatten().view(target.shape))
            else:
                writes.append(_copier([position], [target], []))
        targets += [part for part, _ in self.constants]
        if targets:
            writes.append(_copier(positions, targets, [content for _, content in self.constants]))
        if self.zeros:
            as_one = all(part.stride(-1) == 1 for part in self.zeros)
            zeros = _as(_one_type(self.zeros) if as_one else None, self.zeros)
            writes.append(lambda _: zero_all(zeros))
        return (*writes, *(partial(_copy, part, content) for part, content in self.others))


def _copier(positions: list[int], targets: list[Tensor], constants: list[Tensor]) -> Write:
    """A function that copies inputs to the first targets, and constants to the others."""
    if len(targets) == 1 and positions:
        position, copy = positions[0], targets[0].copy_
        return lambda tensors: copy(tensors[position])

    def copy_as_they_are(tensors: tuple[Tensor, ...]) -> None:
        copy_all(targets, [tensors[position] for position in positions] + constants)

    integer = _one_type(targets)
    if integer is None:
        return copy_as_they_are
    as_integers, as_constants = _as(integer, targets), _as(integer, constants)
    # a view takes a third of the time of the copy
    read = [(p, target.dtype is integer) for p, target in zip(positions, targets, strict=False)]

    def copy_as_integers(tensors: tuple[Tensor, ...]) -> None:
        try:
            inputs = [tensors[p] if fits else tensors[p].view(integer) for p, fits in read]
        except RuntimeError:  # by strides: also of a dimension of size 1, where nothing is apart
            copy_as_they_are(tensors)
        else:
            copy_all(as_integers, inputs + as_constants)

    return copy_as_integers


def _copy(part: Tensor, content: Tensor, tensors: tuple[Tensor, ...]) -> None:
    part.copy_(content)


def _one_type(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The integer as which all are written in one launch; None to write them as they are."""
    integer = INTEGERS[min(each.dtype.itemsize for each in tensors)]
    one_type = all(each.dtype is integer for each in tensors)
    return None if one_type or tensors[0].device.type == "cpu" else integer


def _as(integer: torch.dtype | None, tensors: list[Tensor]) -> list[Tensor]:
    return tensors if integer is None else [each.view(integer) for each in tensors]
