"""Moves KV-cache blocks down between steps, so that those in use are the first ones of the cache.

A block in use and a free one swap their contents, in place: graphs read the cache at the same
addresses, and block tables of later steps have the new places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ... import AuxiliaryTask
from .block_manager import DUMP_BLOCK, BlockManager
from .kv_cache import LayerCache
from .metadata import uploaded

SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Pairs that are swapped at once: a list of pairs is padded to one of these lengths."""


class Defragmenter:
    """Defragments when more than `threshold` free blocks are below the highest block in use.

    While no swap is due a step pays for one search in an array of a byte per block. A swap copies
    at most 512 pairs of blocks of each layer.
    """

    def __init__(
        self, blocks: BlockManager, layers: Mapping[str, LayerCache], threshold: int = 32
    ) -> None:
        self.threshold = threshold
        self.swaps: list[int] = []
        """Pairs of each swap so far."""
        self._blocks = blocks
        caches = [part for cache in layers.values() for part in (cache.keys, cache.values)]
        # layers that share a cache swap it once
        self._caches = list({part.data_ptr(): part for part in caches}.values())

    @property
    def is_due(self) -> bool:
        return self._blocks.gaps > self.threshold

    def run(self) -> None:
        """Swap the highest blocks in use with the lowest free ones as long as that is a gain.

        No step may be in flight. Tables of requests follow.
        """
        candidates = zip(
            reversed(self._blocks.blocks_in_use), sorted(self._blocks.free_blocks), strict=False
        )
        pairs = [(high, low) for high, low in candidates if low < high][: SIZES[-1]]
        self._swap(pairs, next(size for size in SIZES if size >= len(pairs)))
        self._blocks.exchange(pairs)
        self.swaps.append(len(pairs))

    def warmup(self) -> AuxiliaryTask:
        """A swap of each size; each undoes the one before, so an odd number has one more."""
        enough = self._blocks.num_blocks - 1 >= 2
        return AuxiliaryTask(
            "defragmenter",
            (*SIZES, *SIZES[: len(SIZES) % 2]) if enough else (),
            "blocks are swapped between steps",
            lambda size: self._swap([(2, 1)], size),
            "the first swap of each size loads its kernels"
            if enough
            else "none: there are not two blocks to swap",
        )

    def _swap(self, pairs: Sequence[tuple[int, int]], size: int) -> None:
        """Swap the contents of pairs of blocks; padding swaps the dump block with itself."""
        padded = [*pairs, *[(DUMP_BLOCK, DUMP_BLOCK)] * (size - len(pairs))]
        places = [place for pair in padded for place in pair]
        table = uploaded(places, self._caches[0].device).view(-1, 2)
        for cache in self._caches:
            cache[table.flatten()] = cache[table.flip(1).flatten()]
