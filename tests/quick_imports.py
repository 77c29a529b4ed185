"""For programs that tests start: imported first, it saves a quarter of what importing torch takes.

Nothing that is imported is garbage. The program calls `imported` when all that it needs is there.
"""

import gc

gc.disable()


def imported(*, freeze: bool = False) -> None:
    """With `freeze` collections are short: each capture is one. Each start of a model asks whether
    anything is frozen, and counting it takes 25 ms."""
    if freeze:
        gc.collect()
        gc.freeze()
        gc.get_freeze_count = lambda: 1
    gc.enable()
