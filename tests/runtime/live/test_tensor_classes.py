"""Classes of tensors with operators of their own, as inputs, inside graphs and as results."""

import pytest
import torch
from torch import nn

from piecegraph import Batch, break_graph, prepare
from piecegraph.errors import AllCapturesFailed, InputMismatch

from ..conftest import right_step, small_config, strict_backend
from .conftest import Scaled


class Tenfold(torch.Tensor):
    """Its linear layers give ten times as much."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 10 if func is nn.functional.linear else result


class Named(torch.Tensor):
    """Computes as torch does."""


def scaled(x):
    return Scaled((x * 9).to(torch.int8), x.abs().amax() / 9)


@break_graph(fake=torch.empty_like)
def scaled_break(x):
    return scaled(x)


@break_graph(fake=torch.empty_like)
def tenfold_break(x):
    return x.as_subclass(Tenfold)


class Linear(nn.Module):
    def __init__(self, uses=lambda linear, y: y):
        super().__init__()
        self.linear, self.uses = nn.Linear(4, 4), uses
        self.requires_grad_(False)

    def forward(self, x):
        return self.uses(self.linear, self.linear(x))


USES = {
    "inside": lambda linear, y: linear(y) + scaled(y),
    "result": lambda linear, y: scaled(y),
    "break": lambda linear, y: linear(scaled_break(y)),
    "result of a break": lambda linear, y: linear(scaled_break(y) + scaled(y)),
}


def prepared_for(model, **settings):
    config = small_config(8, inputs={"x": "float32[num_tokens, 4]"}, capture_sizes=(4,))
    return prepare(model, config.changed(**settings), backend=strict_backend())


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
@pytest.mark.parametrize("compiles", [True, False], ids=["traced", "untraced"])
@pytest.mark.parametrize("kind", [Tenfold, Named, Scaled, nn.Parameter])
def test_inputs_of_another_class_are_right_or_refused(kind, compiles, mode):
    model = Linear()
    prepared = prepared_for(model, compile=compiles, graph_mode=mode)
    prepared.capture()
    rows = torch.rand(4, 4)
    prepared(rows, batch=Batch(4, 4))  # the form of a plain tensor is known
    x = scaled(rows) if kind is Scaled else rows.as_subclass(kind)
    if kind is Tenfold:
        with pytest.raises(InputMismatch, match="'x' is a Tenfold, a class of tensors with oper"):
            prepared(x, batch=Batch(4, 4))
        return
    torch.testing.assert_close(prepared(x, batch=Batch(4, 4)) + 0, model(x) + 0)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_class_inside_a_graph_computes_in_each_step(use, mode):
    if mode == "PIECEWISE" and "break" not in use:
        return
    model = Linear(USES[use])
    prepared = prepared_for(model, compile=False, graph_mode=mode)
    prepared.capture()
    for _ in range(2):
        assert right_step(prepared, lambda x: model(x) + 0, torch.randn(4, 4)) == mode


def test_a_break_whose_result_keeps_its_class_is_refused():
    model = Linear(lambda linear, y: linear(tenfold_break(y)).as_subclass(torch.Tensor))
    prepared = prepared_for(model, compile=False, graph_mode="PIECEWISE")
    with pytest.raises(AllCapturesFailed, match=r"a result of tenfold_break is a Tenfold"):
        prepared.capture()


def test_a_traced_result_of_a_class_is_refused_where_graphs_are_emulated():
    prepared = prepared_for(Linear(USES["result"]), graph_mode="FULL")
    with pytest.raises(AllCapturesFailed, match=r"a result of a piece is a Scaled"):
        prepared.capture()
