"""What an engine does around steps and captures: other streams, devices, graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import piecegraph as pg

from .control import LAUNCH_FAILURE, StandIn
from .models import batch, eager, prepared
from .test_captures import two_devices

SETTINGS: dict[str, Any] = {"hidden": 64, "capture_sizes": (4, 8, 16), "max_num_tokens": 32}


def nothing(*_: Any) -> None:
    return None


def captured(device: str = "cuda:0", mode: str = "PIECEWISE", **settings: Any) -> pg.PreparedModel:
    model = prepared(device, **{**SETTINGS, "graph_mode": mode, **settings})
    model.capture(nothing)
    return model


def check(model: pg.PreparedModel, num_tokens: int, device: str = "cuda:0") -> None:
    """A step gives what the model gives without the library."""
    x = torch.randn(num_tokens, 64, device=device)
    result = model(x, batch=batch(num_tokens), metadata=None)
    torch.testing.assert_close(result, eager(x), rtol=1e-5, atol=1e-5)


@pytest.fixture
def model() -> Iterator[pg.PreparedModel]:
    made = captured()
    yield made
    made.close()


@two_devices
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_models_of_two_devices_take_turns(mode: str) -> None:
    models = {device: captured(device, mode) for device in ("cuda:0", "cuda:1")}
    for current in (0, 1):
        with torch.cuda.device(current):
            for num_tokens in (3, 16, 8):
                for device, model in models.items():
                    check(model, num_tokens, device)
    models.pop("cuda:0").close()
    check(models["cuda:1"], 5, "cuda:1")
    models["cuda:1"].close()


def test_captures_and_steps_on_streams_of_the_engine() -> None:
    outer, inner = torch.cuda.Stream(), torch.cuda.Stream()
    model = prepared("cuda:0", **SETTINGS, graph_mode="PIECEWISE")
    torch.cuda.synchronize()
    with torch.cuda.stream(outer):
        with torch.cuda.stream(inner):
            model.capture(nothing)
            assert torch.cuda.current_stream() == inner
            check(model, 5)
        outer.wait_stream(inner)
        check(model, 16)
        assert torch.cuda.current_stream() == outer
    torch.cuda.current_stream().wait_stream(outer)
    check(model, 7)
    model.close()


def test_emptied_caches_and_reused_inputs_between_steps(model: pg.PreparedModel) -> None:
    host = torch.empty(16, 64).pin_memory()
    for value in range(4):
        host.fill_(value)
        torch.cuda.synchronize()
        x = host.to("cuda", non_blocking=True)
        expected = eager(x)
        result = model(x, batch=batch(16), metadata=None)
        x.fill_(-1)  # the step has its own copy
        del x
        torch.cuda.empty_cache()
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_closing_waits_for_steps(stand_in: StandIn) -> None:
    for seed in range(4):
        stand_in.seed(seed)
        model = captured()
        x = torch.randn(16, 64, device="cuda:0")
        result = model(x, batch=batch(16), metadata=None).clone()
        model.close()
        del model
        gc.collect()
        torch.cuda.empty_cache()
        torch.testing.assert_close(result, eager(x), rtol=1e-5, atol=1e-5)


def test_graphs_of_the_engine_beside_ours() -> None:
    x = torch.randn(4, 64, device="cuda:0")
    own = torch.cuda.CUDAGraph()
    with torch.cuda.graph(own):
        y = x * 2 + 1
    model = captured()
    later = torch.cuda.CUDAGraph()
    with torch.cuda.graph(later):
        z = x * 3
    for num_tokens in (3, 16):
        x.fill_(num_tokens)
        own.replay()
        check(model, num_tokens)
        later.replay()
        assert y.unique().tolist() == [2.0 * num_tokens + 1]
        assert z.unique().tolist() == [3.0 * num_tokens]
    model.close()
    own.replay()
    later.replay()
    torch.cuda.synchronize()


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 REFUSES a replay while a graph is captured"
)
def test_an_engine_captures_a_step(model: pg.PreparedModel) -> None:
    x = torch.randn(16, 64, device="cuda:0")
    model(x, batch=batch(16), metadata=None)
    torch.cuda.synchronize()
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole):
        result = model(x, batch=batch(16), metadata=None)
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.copy_(torch.randn(16, 64))
        whole.replay()
        torch.testing.assert_close(result, eager(x), rtol=1e-5, atol=1e-5)


def test_a_fault_in_one_step_is_an_error_and_the_next_is_right(
    model: pg.PreparedModel, stand_in: StandIn
) -> None:
    check(model, 8)
    stand_in.inject("cudaGraphLaunch", LAUNCH_FAILURE)
    with pytest.raises(RuntimeError):
        check(model, 8)
    for num_tokens in (8, 3):
        check(model, num_tokens)
