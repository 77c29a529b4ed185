"""The room is light: it can be imported where there is no time."""

from __future__ import annotations

import subprocess
import sys

import pytest

import piecegraph.dispatch

PROBE = """
import time
start = time.process_time()
from piecegraph.dispatch import Dispatcher, resolve_mode, default_capture_sizes
print(time.process_time() - start)
"""


def probe() -> float:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_it_is_imported_in_less_than_50_ms():
    assert min(probe() for _ in range(5)) < 0.05


def test_public_names_exist_and_others_do_not():
    assert all(hasattr(piecegraph.dispatch, name) for name in piecegraph.dispatch.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        piecegraph.dispatch.no_such_name  # noqa: B018
