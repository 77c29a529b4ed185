"""Fused operators that passes introduce, with implementations for every device.

An engine registers a faster kernel for its device with `torch.library.impl`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LIBRARY: Any = torch.library.Library("piecegraph", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)"
)
LIBRARY.define("silu_and_mul(Tensor gate, Tensor up) -> Tensor")


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm (Zhang and Sennrich) of `x + residual` over the last dimension, and that sum.

    `x`, `residual`: (…, hidden), `weight`: (hidden,), of one dtype; the mean is in float32.
    """
    total = x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(total.dtype) * weight, total


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, for tensors of one shape and dtype."""
    return torch.nn.functional.silu(gate) * up


def _like_x(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x + residual), torch.empty_like(x + residual)


def _like_gate(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate * up)


LIBRARY.impl("add_rms_norm", add_rms_norm, "CompositeExplicitAutograd")
LIBRARY.impl("silu_and_mul", silu_and_mul, "CompositeExplicitAutograd")
torch.library.register_fake("piecegraph::add_rms_norm", _like_x, lib=LIBRARY)
torch.library.register_fake("piecegraph::silu_and_mul", _like_gate, lib=LIBRARY)
