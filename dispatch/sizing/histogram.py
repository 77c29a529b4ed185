"""How often each number of tokens was dispatched, in bounded memory."""

from __future__ import annotations

from collections import Counter, deque


class Histogram:
    """The numbers of tokens of the last `window` batches, so that old traffic is forgotten.

    `add` records one batch; it is the bound method of a C type, since every dispatch calls it.
    """

    def __init__(self, window: int = 1 << 16) -> None:
        self._last: deque[int] = deque(maxlen=window)
        self.add = self._last.append

    def counts(self, limit: int) -> list[int]:
        """How often each number of tokens from 0 to `limit` occurs; more are left out."""
        seen = Counter(self._last.copy())
        return [seen[num_tokens] for num_tokens in range(limit + 1)]
