"""Python's search for cyclic garbage, put off while a model is brought up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep Python from looking for cyclic garbage: a tenth of a start goes into it.

    What was made meanwhile then counts as old: to look through all of it at once takes 0.2 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # what somebody froze stays so
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
