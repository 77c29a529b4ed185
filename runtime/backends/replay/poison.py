"""Values that make a read of unwritten memory loud: NaN, or the integer farthest out of range."""

from __future__ import annotations

import torch
from torch import Tensor


def poison(tensor: Tensor) -> None:
    """Overwrite `tensor` in place with values that no right computation gives."""
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in the 8-bit formats with a sign and a NaN
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(limits.min or limits.max)
