"""The paged KV cache: for each attention layer, keys and values in blocks of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from ... import AuxiliaryTask
from .block_manager import DUMP_BLOCK, BlockManager


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache; what its attention op finds under the layer's name.

    `keys` and `values`: (num_blocks, block_size, num_kv_heads, head_dim) in the model's dtype.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def clone(self) -> Self:
        return replace(self, keys=self.keys.clone(), values=self.values.clone())


def allocate_layer_caches(
    layer_names: list[str],
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, LayerCache]:
    """Caches by layer name, zeroed: a slot that was never written contains finite values."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return {
        name: LayerCache(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )
        for name in layer_names
    }


THRESHOLD = 32
"""Unused blocks below the highest used one that do not start a defragmentation."""

SWAP_SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Numbers of pairs that are exchanged at once: lists of pairs are padded to one of them."""


class Defragmenter:
    """Moves blocks between steps; tables of requests and the list of free blocks follow."""

    def __init__(
        self, blocks: BlockManager, layers: Mapping[str, LayerCache], *, threshold: int = THRESHOLD
    ) -> None:
        self._blocks = blocks
        self._caches = [cache for layer in layers.values() for cache in (layer.keys, layer.values)]
        self._threshold = threshold

    def run(self) -> int:
        """Defragment if there are enough gaps; returns the number of exchanged pairs."""
        used = self._blocks.used
        if max(used, default=0) - self._threshold <= len(used):
            return 0
        pairs = swap_pairs(used, self._blocks.free_blocks)
        self.swap(pairs)
        self._blocks.exchange(pairs)
        return len(pairs)

    def swap(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange the contents of the blocks of each pair; padding exchanges the dump block."""
        self._swap(pairs, next(size for size in SWAP_SIZES if size >= len(pairs)))

    def _swap(self, pairs: Sequence[tuple[int, int]], size: int) -> None:
        padded = [*pairs, *[(DUMP_BLOCK, DUMP_BLOCK)] * (size - len(pairs))]
        table = torch.tensor(padded, device=self._caches[0].device)
        for cache in self._caches:
            cache[table.flip(1).flatten()] = cache[table.flatten()]

    def warmup(self) -> AuxiliaryTask:
        """The warm-up task: exchanges of every size that can occur, made and reverted."""

        def run(size: int) -> None:
            for _ in ("done", "undone"):
                self._swap([(2, 1)], size)

        most = (self._blocks.num_blocks - 1) // 2  # pairs of a used and a free block
        sizes = SWAP_SIZES[: bisect_left(SWAP_SIZES, most) + 1] if most else ()
        return AuxiliaryTask("defragmenter", sizes, "blocks change places between steps", run)


def swap_pairs(used: Sequence[int], free: Sequence[int]) -> list[tuple[int, int]]:
    """(used, free) block ids: the highest used with the lowest free, as long as that is a gain."""
    candidates = zip(sorted(used, reverse=True), sorted(free), strict=False)
    gains = [(high, low) for high, low in candidates if low < high]
    return gains[: SWAP_SIZES[-1]]
