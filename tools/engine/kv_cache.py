"""The paged KV cache: for each attention layer, keys and values in blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache; what its attention op finds under the layer's name.

    `keys` and `values`: (num_blocks, block_size, num_kv_heads, head_dim) in the model's dtype.
    `window`: the last tokens that a token sees, itself among them; 0 for all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    window: int = field(default=0, kw_only=True)


def allocate_layer_caches(
    layer_names: list[str],
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int = 0,
) -> dict[str, LayerCache]:
    """Caches by layer name, zeroed: a slot that was never written contains finite values."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return {
        name: LayerCache(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
            window=window,
        )
        for name in layer_names
    }
