"""The engine's clock: wall time without idling and without what is not the engine's work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds since it was last started; it can jump over idle time and stand still for a while."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Count from 0 again."""
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def skip_to(self, moment: float) -> None:
        """Jump ahead to `moment`; a moment that has passed changes nothing."""
        self._zero -= max(0.0, moment - self.now())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no time pass meanwhile."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._zero += time.perf_counter() - before
