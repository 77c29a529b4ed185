"""The engine's clock jumps and stands still, and otherwise runs."""

from __future__ import annotations

import time

from piecegraph.tools.clock import Clock


def test_it_runs():
    clock = Clock()
    time.sleep(0.01)
    assert 0.01 <= clock.now() < 5


def test_it_jumps_forward_only():
    clock = Clock()
    clock.skip_to(100.0)
    assert 100 <= clock.now() < 105
    clock.skip_to(50.0)
    assert clock.now() >= 100


def test_it_stands_still():
    clock = Clock()
    with clock.stopped():
        time.sleep(0.05)
    assert clock.now() < 0.05
