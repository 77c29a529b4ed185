"""Steps in flight on a device: what is rewritten too early, and the event that says when."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cuda_stand_in import values
from tests.tools.conftest import started

from .models import batch, eager
from .test_scenes import captured

SEEDS = range(3)


def on_host(event: torch.cuda.Event, other: torch.cuda.Stream) -> None:
    event.synchronize()


def on_stream(event: torch.cuda.Event, other: torch.cuda.Stream) -> None:
    event.wait(other)


@pytest.mark.parametrize("seed", range(8))
def test_a_wait_ends_where_what_runs_meanwhile_submits_more(stand_in, seed):
    """A wait for a stream is for what was last on it when the wait began."""
    stand_in.seed(seed)
    torch.cuda.synchronize()
    ran = list[int]()

    def submit_more() -> None:
        ran.append(1)
        for _ in range(4):
            values.on_stream("later", lambda: ran.append(2))

    values.on_stream("first", submit_more)
    values.on_stream("second", lambda: ran.append(1))
    torch.cuda.current_stream().synchronize()
    assert ran.count(1) == 2
    torch.cuda.synchronize()
    assert ran.count(2) == 4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
@pytest.mark.parametrize("wait", [on_host, on_stream])
def test_another_stream_rewrites_inputs_after_the_event(stand_in, mode, seed, wait):
    stand_in.seed(seed)
    model, other = captured("cuda:0", mode), torch.cuda.Stream()
    x = torch.randn(4, 64, device="cuda:0")
    expected = eager(x)
    torch.cuda.synchronize()
    result = model(x, batch=batch(4), metadata=None)
    wait(model.reads_done(), other)
    with torch.cuda.stream(other):
        x.zero_()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    model.close()


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_without_the_event_some_order_is_wrong(stand_in, mode):
    """Inputs by another stream, and pinned memory that the host rewrites: both need it."""
    wrong = {"stream": 0, "pinned": 0}
    for seed in range(64):  # one in four finds it
        stand_in.seed(seed)
        model, other = captured("cuda:0", mode), torch.cuda.Stream()
        x, pinned = torch.randn(4, 64, device="cuda:0"), torch.randn(4, 64).pin_memory()
        expected = eager(x), eager(pinned.to("cuda:0"))
        torch.cuda.synchronize()
        result = model(x, batch=batch(4), metadata=None).clone()
        with torch.cuda.stream(other):
            x.zero_()
        torch.cuda.synchronize()
        wrong["stream"] += not torch.allclose(result, expected[0], rtol=1e-5, atol=1e-5)
        result = model(pinned.to("cuda:0", non_blocking=True), batch=batch(4), metadata=None)
        pinned.zero_()
        wrong["pinned"] += not torch.allclose(result, expected[1], rtol=1e-5, atol=1e-5)
        model.close()
        if all(wrong.values()):
            return
    pytest.fail(f"all orders were right: {wrong}")


ENGINES = [("full-decode-only", {}), ("piecewise", {"lora": 2, "strategy": "lazy"})]


@pytest.mark.parametrize(("mode", "more"), ENGINES)
def test_the_reference_engine_overlaps(stand_in, mode, more):
    def served(seed: int, device: str, **options: Any) -> list[list[int]]:
        stand_in.seed(seed)
        small = {"requests": 5, "length_scale": 0.05, "mode": mode, "attention": "plain"}
        with started(**small, device=device, **options, **more) as engine:
            return engine.serve()

    expected = served(0, "cpu")
    for seed in SEEDS:
        assert served(seed, "cuda:0", overlap=True) == expected
