"""For programs that tests start: imported first, it saves a quarter of what importing torch takes.

Nothing that is imported is garbage. The program calls `imported` when all that it needs is there,
and `end` when it has done its work.
"""

import gc
import os
import sys
from typing import NoReturn

gc.disable()


def imported(*, freeze: bool = False) -> None:
    """With `freeze` collections are short: each capture is one. Each start of a model asks whether
    anything is frozen, and counting it takes 25 ms."""
    if freeze:
        gc.collect()
        gc.freeze()
        gc.get_freeze_count = lambda: 1
    gc.enable()


def end() -> NoReturn:
    """Of a program that nothing must see taken apart: torch and its compilers take a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
