"""Device memory as torch's real caching allocator takes and returns it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.runtime.backends.cuda import CudaBackend
from piecegraph.runtime.graphs.recorder import record
from piecegraph.runtime.graphs.session import capture_session

from .control import StandIn
from .models import batch, eager, prepared

MIB = 1 << 20
SIZES = (512, 1024, 2048, 4096)


@pytest.fixture
def model() -> Iterator[pg.PreparedModel]:
    made = prepared(graph_mode="PIECEWISE", capture_sizes=SIZES)
    gc.collect()
    made.backend.trim()
    yield made
    made.close()


def nothing(*_: Any) -> None:
    return None


@pytest.mark.usefixtures("without_values")
def test_a_forecast_leaves_nothing_allocated(model: pg.PreparedModel, stand_in: StandIn) -> None:
    used = stand_in.used()
    model.memory_plan(0.9, nothing)
    assert stand_in.used() - used <= 2 * MIB


@pytest.mark.usefixtures("without_values")
def test_a_plan_counts_the_memory_of_graphs_once(
    model: pg.PreparedModel, stand_in: StandIn
) -> None:
    used = stand_in.used()
    plan = model.memory_plan(0.9, nothing)
    total = torch.cuda.mem_get_info()[1]
    assert plan.graphs > 32 * MIB
    assert plan.kv_cache == pytest.approx(0.9 * total - used - plan.graphs, abs=16 * MIB)


@pytest.mark.usefixtures("without_values")
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


def test_graphs_keep_the_workspace_of_their_multiplications(
    model: pg.PreparedModel, stand_in: StandIn
) -> None:
    model.capture(nothing)
    model.backend.trim()
    others = [torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    for num_tokens in (100, 4000):
        x = torch.randn(num_tokens, 512, device="cuda")
        result = model(x, batch=batch(num_tokens), metadata=None).clone()
        torch.cuda.synchronize()
        torch.testing.assert_close(result, eager(x))
    assert not any(each.any() for each in others)


def test_memory_that_outlives_its_backend_is_unmapped() -> None:
    """torch waits for the stream of a segment before it unmaps it."""
    set_allocator = torch._C._accelerator_setAllocatorSettings
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    set_allocator("expandable_segments:True")
    try:
        backend, events = CudaBackend(), pg.Events()
        with capture_session(backend, backend.new_pool(), events) as session:
            x = torch.ones(1 << 20, device="cuda")
            recording = record(torch.neg, (x,), session, name="n", breaks=False)
        output = recording.outputs
        recording.release()
        used = torch.cuda.memory_reserved()
        session.close()
        del session, recording, backend
        gc.collect()
        del output, x
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < used
    finally:
        set_allocator(f"expandable_segments:{expandable}")


@pytest.mark.usefixtures("without_values")
def test_the_memory_of_other_processes_is_not_counted_as_that_of_graphs(
    model: pg.PreparedModel, stand_in: StandIn
) -> None:
    before = model.backend.memory()
    plan = model.memory_plan(0.9, nothing)
    others = iter(range(1, 10))

    def at_each_dummy_batch(*_: Any) -> None:
        stand_in.other_process(next(others) * 16 * MIB)

    try:
        model.capture(at_each_dummy_batch)
        taken = sum(recording.bytes for _, recording in model.recordings())
        assert taken == pytest.approx(plan.graphs, rel=0.1)
        now = model.backend.memory()
        assert now.other - before.other == sum(range(1, next(others))) * 16 * MIB
        assert now.total == before.total == torch.cuda.mem_get_info()[1]
        later = model.memory_plan(0.9, nothing)
        assert plan.kv_cache - later.kv_cache == pytest.approx(now.other, rel=0.05)
    finally:
        stand_in.other_process(-model.backend.memory().other)
