"""A model that cannot be traced is refused with the user's file and line, a reason and advice."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from piecegraph.errors import (
    InputNotTraceable,
    NothingToCompile,
    Specialised,
    TraceFailed,
    UnboundSymbol,
    UnknownCompiler,
)

from . import ops as _registers  # noqa: F401

pytestmark = pytest.mark.compile

X = {"x": "float32[num_tokens, 8]"}
OUTSIDE = torch.randn(8)


class Inner(nn.Module):
    """The fault may lie deep in a model."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.body(self, x)


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), Inner(body))

    def forward(self, x):
        return self.layers(x) * 2


def graph_break(m, x):
    print(x)  # here
    return x


def disabled_call(m, x):
    torch._dynamo.graph_break()  # here
    return x


def branch_on_data(m, x):
    y = m.linear(x)
    if y.sum() > 0:  # here
        return y
    return x


def item_as_branch(m, x):
    if x.sum().item() > 0:  # here
        return x
    return m.linear(x)


def item_as_shape(m, x):
    return x[: int(x[0, 0].item())] * 2  # here


def raises(m, x):
    raise ValueError("not this model")  # here


def wrong_shapes(m, x):
    return m.linear(x[:, :4])  # here


def loop_over_tokens(m, x):
    total = x[0]
    for row in x:  # here
        total = total + row
    return total


def size_as_key(m, x):
    return x * {17: 1.0}[x.shape[0]]  # here


FAULTS = [
    graph_break,
    disabled_call,
    branch_on_data,
    item_as_branch,
    raises,
    wrong_shapes,
    loop_over_tokens,
    size_as_key,
]


def line_of(body) -> int:
    lines, first = inspect.getsourcelines(body)
    return first + next(i for i, line in enumerate(lines) if "# here" in line)


@pytest.mark.parametrize("body", FAULTS, ids=lambda body: body.__name__)
def test_error_names_the_line(compiled, body):
    with pytest.raises((TraceFailed, Specialised)) as caught:
        compiled(Model(body), inputs=X)
    file, _, line = caught.value.where.partition(" in ")[0].rpartition(":")
    assert file.endswith("test_trace_errors.py")
    assert int(line) == line_of(body)
    assert caught.value.where in str(caught.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (graph_break, "builtin"),
        (branch_on_data, "Data-dependent branching"),
        (raises, "not this model"),
        (wrong_shapes, "same reduction dim"),
    ],
)
def test_error_gives_the_reason(compiled, body, said):
    with pytest.raises(TraceFailed, match=said):
        compiled(Model(body), inputs=X)


def test_size_that_depends_on_data_cannot_leave_the_model(compiled):
    def body(m, x):
        return x[x[:, 0] > 0]

    with pytest.raises(UnboundSymbol):
        compiled(Inner(body), inputs=X)


def test_size_that_depends_on_data_may_live_inside_a_piece(compiled):
    def body(m, x):
        return x[x[:, 0] > 0].sum(0)

    made = compiled(Inner(body), inputs=X)
    x = torch.randn(9, 8)
    torch.testing.assert_close(made(x), body(None, x))


def test_tensor_from_nowhere_is_named(compiled):
    def body(m, x):
        return x + OUTSIDE

    with pytest.raises(InputNotTraceable, match="OUTSIDE"):
        compiled(Inner(body), inputs=X)


def test_model_without_tensor_operations(compiled):
    with pytest.raises(NothingToCompile, match="Inner"):
        compiled(Inner(lambda m, x: 3), inputs=X)


def test_compiler_that_does_not_exist(compiled):
    with pytest.raises(UnknownCompiler, match="inductor"):
        compiled(Inner(lambda m, x: x + 1), inputs=X, compiler="no_such_compiler")


def test_registered_torch_backends_are_compilers(compiled):
    made = compiled(Inner(lambda m, x: m.linear(x) + 1), inputs=X, compiler="aot_eager")
    x = torch.randn(3, 8)
    assert made(x).shape == (3, 8)


def test_model_can_be_prepared_after_a_failed_attempt(compiled):
    with pytest.raises(TraceFailed):
        compiled(Model(branch_on_data), inputs=X)
    model = Model(lambda m, x: m.linear(x))
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(model, inputs=X)(x), model(x).detach())
