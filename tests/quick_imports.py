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


def imported_by_starts() -> None:
    """What a start and captures import is there, so that no fork imports it; the heap is frozen."""
    from torch import nn

    from piecegraph import Config, prepare
    from piecegraph.runtime.backends.replay.backend import ReplayBackend

    config = Config(
        compile=False, graph_mode="FULL", inputs={"input": "float32[num_tokens, 2]"}, cache=False,
        max_num_tokens=8, max_num_reqs=8, capture_sizes=(2,), attention={"support": 3},
    )  # fmt: skip
    prepare(nn.Identity(), config, backend=ReplayBackend()).capture()
    imported(freeze=True)


def end() -> NoReturn:
    """Of a program that nothing must see taken apart: torch and its compilers take a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
