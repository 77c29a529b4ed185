"""What an engine does around steps and captures: other streams, devices, graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.errors import HostValueChanged

from .control import LAUNCH_FAILURE
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
def test_models_of_two_devices_take_turns(mode):
    models = {device: captured(device, mode) for device in ("cuda:0", "cuda:1")}
    for current in (0, 1):
        with torch.cuda.device(current):
            for num_tokens in (3, 16, 8):
                for device, model in models.items():
                    check(model, num_tokens, device)
    models.pop("cuda:0").close()
    check(models["cuda:1"], 5, "cuda:1")
    models["cuda:1"].close()


def test_captures_and_steps_on_streams_of_the_engine():
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


def test_emptied_caches_and_reused_inputs_between_steps(model):
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


def test_closing_waits_for_steps(stand_in):
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


def test_graphs_of_the_engine_beside_ours():
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


@pytest.mark.parametrize("seed", range(4))
def test_graphs_of_the_engine_captured_before_ours_keep_their_workspaces(stand_in, seed):
    """vLLM's order: warm-up and its own graphs on one stream, then our plan and our captures."""
    stand_in.seed(seed)
    model, stream = prepared("cuda:0", **SETTINGS, graph_mode="FULL"), torch.cuda.Stream()
    x, weight = (torch.randn(8, 64, device="cuda:0") for _ in range(2))
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    with torch.cuda.stream(stream):
        _ = x @ weight.T
        results = []
        for graph in graphs:
            graph.capture_begin(pool=graphs[0].pool() if results else None)
            results.append((x @ weight.T) * 2)
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    model.parts.strategies.memory_plan(0.9, nothing)
    model.capture(nothing)
    others = [torch.full((1 << 20,), 7.0, device="cuda:0") for _ in range(64)]
    for step in range(3):
        x.copy_(torch.randn(8, 64))
        for graph, result in zip(graphs, results, strict=True):
            graph.replay()
            torch.testing.assert_close(result, (x @ weight.T) * 2, rtol=1e-5, atol=1e-5)
        check(model, 4 + step)
    assert all(each.eq(7.0).all() for each in others)
    model.release()
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    model.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_steps_of_streams_that_do_not_wait_for_each_other(stand_in, mode, seed):
    """They share static inputs: the later one waits."""
    stand_in.seed(seed)
    model, streams = captured("cuda:0", mode), [torch.cuda.Stream() for _ in range(2)]
    inputs = [torch.randn(4 + number, 64, device="cuda:0") for number in range(8)]
    expected, results = [eager(x) for x in inputs], []
    torch.cuda.synchronize()
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 2]):
            results.append(model(x, batch=batch(len(x)), metadata=None).clone())
    torch.cuda.synchronize()
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=1e-5, atol=1e-5)
    model.close()


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_value_on_the_host_that_changes_after_a_capture_is_an_error(mode):
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Parameter(torch.ones(1))
            self.factor = torch.tensor(2.0)  # a move to the device leaves it on the host

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = torch.empty_like(x)
            torch.ops.standin.attention(x * self.factor, output, "layer 0")
            return output + self.one

    module = Scaled()
    model = captured(mode=mode, model=module, capture_sizes=(8,))
    assert model.report()["host_values"][0]["tensors"] == ["factor"]
    x = torch.ones(8, 64, device="cuda:0")
    assert model(x, batch=batch(8), metadata=None).unique().tolist() == [5.0]
    module.factor.fill_(3.0)
    with pytest.raises(HostValueChanged, match="factor"):
        model(x, batch=batch(8), metadata=None)
    model.refresh()
    assert model(x, batch=batch(8), metadata=None).unique().tolist() == [7.0]
    model.close()


def test_steps_on_one_stream_record_no_event(model, stand_in):
    check(model, 8)
    x = torch.randn(8, 64, device="cuda:0")
    before = [stand_in.calls(call) for call in ("cudaEventRecord", "cudaStreamWaitEvent")]
    for _ in range(3):
        model(x, batch=batch(8), metadata=None)
    assert before == [stand_in.calls(call) for call in ("cudaEventRecord", "cudaStreamWaitEvent")]


@pytest.mark.parametrize(("mode", "strategy"), [("PIECEWISE", "eager"), ("FULL", "lazy")])
def test_a_step_that_the_engine_captures_captures_nothing_itself(mode, strategy):
    """Under LAZY its graph would be captured first, which ends the engine's capture with an error
    of the driver. It replays a larger graph instead. Torch 2.11 refuses each replay by name."""
    model = prepared("cuda:0", **SETTINGS, graph_mode=mode, strategy=strategy)
    model.capture(nothing)
    graphs = len(model.recordings())
    x, whole = torch.randn(8, 64, device="cuda:0"), torch.cuda.CUDAGraph()
    refuses = torch.__version__ < "2.12"
    refused = pytest.raises(RuntimeError, match="prepare for replay during capturing stage")
    with refused if refuses else nullcontext(), torch.cuda.graph(whole):
        result = model(x, batch=batch(8), metadata=None)
    assert len(model.recordings()) == graphs
    for _ in range(0 if refuses else 2):
        x.copy_(torch.randn(8, 64))
        whole.replay()
        torch.testing.assert_close(result, eager(x), rtol=1e-5, atol=1e-5)
    check(model, 8)
    assert len(model.recordings()) == (2 if strategy == "lazy" else graphs)
    model.close()


def test_a_fault_in_one_step_is_an_error_and_the_next_is_right(model, stand_in):
    check(model, 8)
    stand_in.inject("cudaGraphLaunch", LAUNCH_FAILURE)
    with pytest.raises(RuntimeError):
        check(model, 8)
    for num_tokens in (8, 3):
        check(model, num_tokens)
