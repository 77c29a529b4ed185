"""How often each number of tokens was dispatched, in bounded memory."""

from __future__ import annotations


class Histogram:
    """Counts by number of tokens, 0 to `limit`; larger batches are counted together in `above`.

    Every `window` batches all counts are halved, so that old traffic fades.
    """

    def __init__(self, limit: int, *, window: int = 1 << 20) -> None:
        self.limit = limit
        self.window = window
        self.counts = [0] * (limit + 1)
        self.above = 0
        self._left = window

    def add(self, num_tokens: int) -> None:
        if num_tokens <= self.limit:
            self.counts[num_tokens] += 1
        else:
            self.above += 1
        self._left -= 1
        if not self._left:
            self._fade()

    def _fade(self) -> None:
        self.counts = [count // 2 for count in self.counts]
        self.above //= 2
        self._left = self.window
