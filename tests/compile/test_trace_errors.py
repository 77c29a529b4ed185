"""A model that cannot be traced is refused with the user's file and line, a reason and advice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from piecegraph.errors import (
    NothingToCompile,
    Specialized,
    TraceFailed,
    UnboundSymbol,
    UnknownCompiler,
)

from .models import Body, X, marked_line

pytestmark = pytest.mark.compile


class Model(nn.Module):
    """The fault may be deep in a model."""

    def __init__(self, body):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), Body(body))

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
    (graph_break, "builtin"),
    (disabled_call, "graph_break"),
    (branch_on_data, "Data-dependent branching"),
    (item_as_branch, "Could not guard on data-dependent"),
    (raises, "not this model"),
    (wrong_shapes, "same reduction dim"),
    (loop_over_tokens, "specializes on that size"),
    (size_as_key, "specializes on that size"),
]


@pytest.mark.parametrize(("body", "said"), FAULTS, ids=lambda each: getattr(each, "__name__", ""))
def test_error_names_the_line_and_gives_the_reason(compiled, body, said):
    with pytest.raises((TraceFailed, Specialized), match=said) as caught:
        compiled(Model(body), inputs=X)
    file, _, line = caught.value.where.partition(" in ")[0].rpartition(":")
    assert file.endswith("test_trace_errors.py")
    assert int(line) == marked_line(body, "# here")
    assert caught.value.where in str(caught.value)


def test_size_that_depends_on_data_cannot_leave_the_model(compiled):
    def body(m, x):
        return x[x[:, 0] > 0]

    with pytest.raises(UnboundSymbol):
        compiled(Body(body), inputs=X)


def test_size_that_depends_on_data_may_live_inside_a_piece(compiled):
    def body(m, x):
        return x[x[:, 0] > 0].sum(0)

    made = compiled(Body(body), inputs=X)
    x = torch.randn(9, 8)
    torch.testing.assert_close(made(x), body(None, x))


def test_model_without_tensor_operations(compiled):
    with pytest.raises(NothingToCompile, match="Body"):
        compiled(Body(lambda m, x: 3), inputs=X)


def test_compiler_that_does_not_exist(compiled):
    with pytest.raises(UnknownCompiler, match="inductor"):
        compiled(Body(lambda m, x: x + 1), inputs=X, compiler="no_such_compiler")


def test_registered_torch_backends_are_compilers(compiled):
    model = Body(lambda m, x: m.linear(x) + 1)
    made = compiled(model, inputs=X, compiler="aot_eager")
    x = torch.randn(3, 8)
    torch.testing.assert_close(made(x), model(x).detach())


def test_model_can_be_prepared_after_a_failed_attempt(compiled):
    with pytest.raises(TraceFailed):
        compiled(Model(branch_on_data), inputs=X)
    model = Model(lambda m, x: m.linear(x))
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(model, inputs=X)(x), model(x).detach())
