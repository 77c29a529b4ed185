"""Which blocks of the paged KV cache belong to which request.

Block 0 is never allocated: it is the dump block, where padding tokens write and which padding
entries of a block table point to. A sentinel such as -1 would be an index of a real slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

DUMP_BLOCK = 0


class BlockManager:
    """Blocks 1 … `num_blocks` - 1, each holding `block_size` consecutive tokens of one request."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(DUMP_BLOCK + 1, num_blocks))
        self._tables: dict[int, list[int]] = {}
        self._in_use = bytearray(num_blocks)

    @property
    def blocks_in_use(self) -> list[int]:
        """Blocks that requests own, ascending."""
        return [block for block, in_use in enumerate(self._in_use) if in_use]

    @property
    def gaps(self) -> int:
        """Free blocks below the highest block in use."""
        highest = max(self._in_use.rfind(1), 0)
        return highest - (self.num_blocks - 1 - len(self._free))

    @property
    def free_blocks(self) -> list[int]:
        return list(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that fit when one request owns every block."""
        return (self.num_blocks - 1) * self.block_size

    def table(self, request_id: int) -> list[int]:
        """The request's blocks in token order; empty for one that owns none."""
        return self._tables.get(request_id, [])

    def grow(self, request_id: int, num_tokens: int) -> bool:
        """Make room for the request's first `num_tokens` tokens; all or nothing."""
        table = self.table(request_id)
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > len(self._free):
            return False
        if missing > 0:
            blocks = [self._free.popleft() for _ in range(missing)]
            self._tables[request_id] = table + blocks
            self._mark(blocks, 1)
        return True

    def free(self, request_id: int) -> None:
        """Free the request's blocks; they are the last to be allocated again."""
        blocks = self._tables.pop(request_id, [])
        self._free.extend(blocks)
        self._mark(blocks, 0)

    def exchange(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Follow blocks in use that changed places with free ones: (in use, free) each.

        The lowest free blocks are the next to be allocated, so that new gaps are few.
        """
        moved = dict(pairs)
        for table in self._tables.values():
            table[:] = [moved.get(block, block) for block in table]
        self._mark(moved, 0)
        self._mark(moved.values(), 1)
        self._free = deque(block for block in range(1, self.num_blocks) if not self._in_use[block])

    def _mark(self, blocks: Iterable[int], in_use: int) -> None:
        for block in blocks:
            self._in_use[block] = in_use

    def slots(self, request_id: int, start: int, stop: int) -> list[int]:
        """Cache slots of the request's tokens at positions `start` … `stop` - 1."""
        table, size = self._tables[request_id], self.block_size
        return [table[position // size] * size + position % size for position in range(start, stop)]
