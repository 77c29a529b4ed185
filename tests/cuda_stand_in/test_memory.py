"""Device memory as torch's real caching allocator takes and returns it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import piecegraph as pg

from .control import StandIn
from .models import batch, eager, prepared

MIB = 1 << 20
SIZES = (512, 1024, 2048, 4096)


@pytest.fixture
def model() -> Iterator[pg.PreparedModel]:
    made = prepared(graph_mode="PIECEWISE", capture_sizes=SIZES)
    gc.collect()
    torch.cuda.empty_cache()
    yield made
    made.close()


def nothing(*_: Any) -> None:
    return None


def test_a_forecast_leaves_nothing_allocated(model: pg.PreparedModel, stand_in: StandIn) -> None:
    used = stand_in.used()
    model.memory_plan(0.9, nothing)
    assert stand_in.used() - used <= 2 * MIB


def test_a_plan_counts_the_memory_of_graphs_once(
    model: pg.PreparedModel, stand_in: StandIn
) -> None:
    used = stand_in.used()
    plan = model.memory_plan(0.9, nothing)
    total = torch.cuda.mem_get_info()[1]
    assert plan.graphs > 32 * MIB
    assert plan.kv_cache == pytest.approx(0.9 * total - used - plan.graphs, abs=16 * MIB)


def test_the_forecast_is_what_the_device_reads(model: pg.PreparedModel, stand_in: StandIn) -> None:
    plan = model.memory_plan(0.9, nothing)
    before = stand_in.used()
    model.capture(nothing)
    taken = stand_in.used() - before
    assert plan.graphs == pytest.approx(taken, rel=0.1)
    assert sum(r.bytes for _, r in model.recordings()) == pytest.approx(taken, rel=0.1)


@pytest.mark.parametrize("how", ["release", "close"])
def test_graphs_that_are_released_give_their_memory_back(
    model: pg.PreparedModel, stand_in: StandIn, how: str
) -> None:
    model.capture(nothing)
    x = torch.randn(100, 512, device="cuda")
    torch.testing.assert_close(model(x, batch=batch(100), metadata=None), eager(x))
    held = stand_in.used()
    taken = sum(recording.bytes for _, recording in model.recordings())
    getattr(model, how)()
    gc.collect()
    assert held - stand_in.used() >= 0.9 * taken
    if how == "release":
        model.capture(nothing)
        torch.testing.assert_close(model(x, batch=batch(100), metadata=None), eager(x))
