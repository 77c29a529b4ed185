"""The room is light: it can be imported where there is no torch and no time."""

from __future__ import annotations

import subprocess
import sys

import pytest

import piecegraph.dispatch

PROBE = """
import sys, time
start = time.process_time()
import piecegraph.dispatch as room
from piecegraph.dispatch import Dispatcher, resolve_mode, default_capture_sizes
spent = time.process_time() - start
[getattr(room, name) for name in room.__all__]
heavy = sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules))
print(spent, *heavy)
"""


def probe() -> tuple[float, list[str]]:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    spent, *heavy = done.stdout.split()
    return float(spent), heavy


def test_nothing_heavy_is_imported_and_it_takes_less_than_50_ms():
    tries = [probe() for _ in range(5)]
    assert [heavy for _, heavy in tries] == [[]] * 5
    assert min(spent for spent, _ in tries) < 0.05


def test_public_names_exist_and_others_do_not():
    assert all(hasattr(piecegraph.dispatch, name) for name in piecegraph.dispatch.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        piecegraph.dispatch.no_such_name  # noqa: B018
