"""The engine's clock jumps and stands still, and otherwise runs."""

import time

import pytest

from piecegraph.tools.engine.serving_log import Clock


@pytest.fixture
def wall(monkeypatch):
    """The wall's clock, which a test sets: `wall[0]` is what it shows."""
    shown = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: shown[0])
    return shown


def test_it_runs(wall):
    clock = Clock()
    wall[0] += 2.5
    assert clock.now() == 2.5


def test_it_starts_again(wall):
    clock = Clock()
    wall[0] += 2.5
    clock.start()
    wall[0] += 1
    assert clock.now() == 1


def test_it_jumps_forward_only(wall):
    clock = Clock()
    clock.skip_to(100.0)
    assert clock.now() == 100
    wall[0] += 3
    clock.skip_to(50.0)
    assert clock.now() == 103


def test_it_stands_still(wall):
    clock = Clock()
    with clock.stopped():
        wall[0] += 5
    assert clock.now() == 0
    wall[0] += 1
    assert clock.now() == 1
