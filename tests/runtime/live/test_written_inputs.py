"""Models that write to their inputs: the caller's tensors are equal in every runtime mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from piecegraph import Batch, break_graph, prepare

from ..conftest import small_config, strict_backend

pytestmark = pytest.mark.compile


def double(x):
    x.mul_(2)


class Writing(nn.Module):
    """Writes to `x` through a view, to `y` by a splitting op; `z` is only read."""

    def forward(self, x, y, z):
        x.view(-1, 2, 2)[:, 0].add_(z[:, :2])
        torch.ops.written_inputs.double(y)
        return x + y, x


@break_graph
def triple(x: Tensor) -> None:
    x.mul_(3)


@break_graph(fake=torch.empty_like)
def copied(x: Tensor) -> Tensor:
    return x.clone()


class Breaking(nn.Module):
    """The same, not traced."""

    def forward(self, x, y, z):
        x[:, 1:].add_(copied(z)[:, 1:])
        triple(y)
        return x + y, x


class Reading(nn.Module):
    def forward(self, x, y, z):
        own = x.clone()
        own.add_(y)
        torch.ops.written_inputs.double(own)
        return own + z


@pytest.fixture(scope="module", autouse=True)
def op(temporary_op):
    return temporary_op("written_inputs::double", "(Tensor(a!) x) -> ()", double)


INPUTS = dict.fromkeys("xyz", "float32[num_tokens, 4]")


def prepared_for(model, buffers=None, backend=None, **settings):
    traced, backend = not isinstance(model, Breaking), backend or strict_backend()
    splits = {"splitting_ops": ("written_inputs::double",)} if traced else {}
    attention = {"support": "UNIFORM_SINGLE_TOKEN_DECODE"}
    config = small_config(32, inputs=INPUTS, capture_sizes=(4, 8), attention=attention, **splits)
    config = config.changed(compile=traced, **settings)
    prepared = prepare(model, config, backend=backend, input_buffers=buffers)
    prepared.capture()
    return prepared


def decode(num_tokens):
    return Batch(num_tokens, num_tokens, is_decode=True, query_len=1)


def written(prepared):
    return {item.path[0] for item in prepared.compiled.plan.inputs if item.written}


def same_as_model(prepared, model, num_tokens):
    """One step; returns the mode it ran in."""
    inputs = [torch.randn(num_tokens, 4) for _ in "xyz"]
    given = [tensor.clone() for tensor in inputs]
    expected = model(*inputs)
    decision = prepared.dispatch(decode(num_tokens))
    result, x = prepared.run(decision, *given)
    torch.testing.assert_close(result, expected[0])
    assert x is given[0] or torch.equal(x, expected[1])
    for tensor, wanted in zip(given, inputs, strict=True):
        torch.testing.assert_close(tensor, wanted)
    return decision.mode.name


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
@pytest.mark.parametrize("strategy", ["eager", "lazy"])
@pytest.mark.parametrize("model", [Writing(), Breaking()])
def test_what_is_written_to_inputs_reaches_the_caller(model, strategy, mode):
    prepared = prepared_for(model, graph_mode=mode, strategy=strategy)
    assert written(prepared) == {"x", "y"}
    modes = [same_as_model(prepared, model, size) for size in (8, 3, 1, 5, 8, 20)]
    assert modes == [mode] * 5 + ["NONE"]


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_result_may_be_the_next_input(mode, delay):
    model, backend = Writing(), strict_backend(delay=delay)
    prepared = prepared_for(model, backend=backend, graph_mode=mode)
    result = expected = torch.randn(4, 4)
    for _ in range(3):
        y, z = torch.randn(2, 4, 4)
        expected = model(expected.clone(), y.clone(), z)[0]
        result = prepared(result, y, z, batch=decode(4))[0]
        torch.testing.assert_close(result, expected)
    del result  # the emulation watches this thread as long as one is alive
    backend.synchronize()


def test_what_generated_code_writes_reaches_the_caller_too():
    model = Writing()
    prepared = prepared_for(model, graph_mode="PIECEWISE", compiler="inductor")
    assert [same_as_model(prepared, model, size) for size in (8, 3)] == ["PIECEWISE"] * 2


def test_a_model_that_only_reads_its_inputs_pays_nothing():
    prepared = prepared_for(Reading(), graph_mode="FULL")
    assert not written(prepared)


@pytest.mark.parametrize("inference", [False, True])
def test_examples_that_are_views_or_were_written_before_are_not_taken_for_written(inference):
    with torch.inference_mode(inference):
        x, y, z = torch.randn(17, 4), torch.randn(19, 4)[2:], torch.randn(17, 4)
        for tensor in (x, y, z):
            tensor.add_(1)
    config = small_config(32, inputs=INPUTS)
    prepared = prepare(Reading(), config, examples=((x, y, z), {}))
    assert not written(prepared)


def test_captures_leave_what_the_engine_has_in_its_buffers():
    model, buffers = Writing(), {name: torch.randn(32, 4) for name in "xy"}
    prepared = prepared_for(model, buffers, graph_mode="FULL", strategy="lazy")
    own = [buffers["x"][:3], buffers["y"][:3], torch.randn(3, 4)]
    inputs = [tensor.clone() for tensor in own]
    decision = prepared.dispatch(decode(3))  # captures
    assert decision.mode.name == "FULL"
    prepared.run(decision, *own)
    model(*inputs)
    for tensor, wanted in zip(own, inputs, strict=True):
        assert torch.equal(tensor, wanted)
