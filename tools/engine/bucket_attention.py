"""Attention of a step in a bucket, whose tensors depend only on the bucket's three dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .kv_cache import LayerCache

NOBODY = -1
"""Owner of the rows and blocks of padding."""


@dataclass(frozen=True, slots=True)
class BucketMetadata:
    """One step in a bucket, int64. For each row of the batch: its cache slot, request and position;
    for each block that attention reads: its place in the cache, request, and first position."""

    slot_mapping: torch.Tensor
    row_owner: torch.Tensor
    position: torch.Tensor
    blocks: torch.Tensor
    block_owner: torch.Tensor
    block_start: torch.Tensor

    def unpadded(self) -> BucketMetadata:
        """The step itself: its inputs are padded by the engine."""
        return self

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
    ) -> None:
        """Each row over the blocks of its request, up to its own position."""
        cache.keys.flatten(0, 1).index_copy_(0, self.slot_mapping, key)
        cache.values.flatten(0, 1).index_copy_(0, self.slot_mapping, value)
        block_size = cache.keys.shape[1]
        rows, heads, dim = query.shape
        group = heads // key.shape[1]
        keys, values = (paged[self.blocks].flatten(0, 1) for paged in (cache.keys, cache.values))
        places = torch.arange(block_size, device=query.device)
        positions = (self.block_start[:, None] + places).flatten()
        owners = self.block_owner.repeat_interleave(block_size, output_size=len(keys))
        seen = (self.row_owner[:, None] == owners) & (positions <= self.position[:, None])
        grouped = query.view(rows, -1, group, dim)
        scores = torch.einsum("rkgd,nkd->rkgn", grouped, keys) * dim**-0.5
        lowest = torch.finfo(torch.float32).min
        weights = scores.float().masked_fill(~seen[:, None, None], lowest).softmax(-1)
        weights = weights.masked_fill(~seen[:, None, None], 0).to(query.dtype)
        output.copy_(torch.einsum("rkgn,nkd->rkgd", weights, values).reshape(rows, heads, dim))
