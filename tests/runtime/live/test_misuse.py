"""What an engine's author passes by mistake is refused at once, in the words of the API."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph import Batch, PreparedModel, StepObserver, prepare
from piecegraph.errors import (
    BatchInvalid,
    InvalidArgument,
    InvalidSetting,
    NotCopyable,
    ReturnsWeight,
)

from ..conftest import Computes, captured, small_config
from .conftest import HIDDEN

Call = Callable[[PreparedModel, torch.Tensor], Any]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p, x: p.watch("kv", None), "kv = a NoneType.*a tensor"),
        (lambda p, x: p.watch("layers", [x]), "layers = a list.*one for each name"),
        (lambda p, x: p.observe(object()), "no method dispatched.*StepObserver"),
        (lambda p, x: p.observe(StepObserver), None),
        (lambda p, x: p(x, batch=Batch(3, 3), y=x), "unexpected keyword argument 'y'.*forward.x"),
        (lambda p, x: p(x, x, batch=Batch(3, 3)), "too many positional.*forward.x"),
        (lambda p, x: p(x, batch=Batch(3, 3), metadata=nn.Linear), "the class Linear.*an object"),
        (lambda p, x: p(batch=Batch(3, 3)), "missing a required argument: 'x'"),
        (lambda p, x: p.capture(3), "capture was called with metadata_for = 3"),
        (lambda p, x: p.warm_up(tasks=[len]), "tasks = .*Sequence.AuxiliaryTask"),
        (lambda p, x: p.checks("FULL"), "decision = 'FULL'. Pass Decision"),
        (lambda p, x: p.reads_in_place(None), "decision = None"),
        (lambda p, x: p.keep_steps("2"), "count = '2'. Pass int"),
        (lambda p, x: p.capture_idle("1"), "budget_ms = '1'. Pass float"),
        (lambda p, x: p.memory_plan(0.5, x), "metadata_for = tensor"),
        (lambda p, x: p.memory_plan(math.inf), "utilization = inf. Pass a number from 0 to 1"),
        (lambda p, x: p.keep_steps(-1), "count = -1. Pass a number from 0 to"),
        (lambda p, x: p.keep_steps(2**70), "count = "),
        (lambda p, x: p.capture_idle(math.nan), "budget_ms = nan. Pass a number from 0 on"),
    ],
)
def test_what_is_passed_is_checked_when_it_is_passed(serve, call, words):
    served = serve()
    if words is None:
        call(served.prepared, torch.rand(3, HIDDEN))
        served.prepared.unobserve(StepObserver)
    else:
        with pytest.raises(InvalidArgument, match=words):
            call(served.prepared, torch.rand(3, HIDDEN))
    assert served.step(1, 1, 1)


def test_counts_that_are_tensors_are_refused_when_the_batch_is_made():
    with pytest.raises(BatchInvalid, match=r"num_reqs is tensor\(3\)"):
        Batch(3, torch.tensor(3))


@pytest.mark.parametrize("value", [1.5, math.nan, -math.inf, 2**31])
def test_padding_that_an_input_cannot_hold_is_refused_by_name(value):
    """Torch's error named the forward of the model, and a half was cut off."""
    inputs = {"x": "float32[num_tokens, 4]", "ids": "int32[num_tokens]"}

    class Picking(nn.Module):
        def forward(self, x, ids):
            return x * ids[:, None]

    settings = small_config(inputs=inputs, steps={"padding": {"x": value, "ids": value}})
    with pytest.raises(InvalidSetting, match=r"steps.padding.ids = .* the input is int32"):
        prepare(Picking(), settings)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_prepared_model_is_not_copied(serve, copied):
    with pytest.raises(NotCopyable, match="Call prepare"):
        copied(serve().prepared)


class Returning(nn.Module):
    """Returns what `returned` gives of it, beside the result."""

    def __init__(self, returned):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("table", torch.ones(3))
        self.returned = returned
        self.requires_grad_(False)

    def forward(self, x):
        return self.linear(x), {"of the model": self.returned(self)}


@pytest.mark.parametrize(
    ("returned", "name"),
    [
        (lambda m: m.table, "'table'.*clone"),
        (lambda m: [m.linear.weight], "'linear.weight'.*clone"),
        (lambda m: m.table.clone(), None),
    ],
)
def test_a_traced_model_that_returns_a_weight_is_told_to_clone_it(returned, name):
    config = small_config(4, inputs={"x": f"float32[num_tokens, {HIDDEN}]"}, graph_mode="NONE")
    if name is not None:
        with pytest.raises(ReturnsWeight, match=name):
            prepare(Returning(returned), config)
        return
    prepared = prepare(Returning(returned), config)
    _, rest = prepared(torch.rand(3, HIDDEN), batch=Batch(3, 1))
    assert rest["of the model"].tolist() == [1, 1, 1]


def test_a_part_of_an_input_that_no_operator_makes_is_called_no_weight():
    model, inputs = Computes(lambda x: (x.real, x * 2)), {"x": "complex64[num_tokens, 4]"}
    with pytest.raises(ReturnsWeight, match=r"returns a tensor of shape .* such as x\.real, which"):
        captured(model, 4, inputs=inputs, graph_mode="NONE")
