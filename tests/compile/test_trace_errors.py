"""A model that cannot be traced is refused with the user's file and line, a reason and advice."""

import logging

import pytest
import torch
from torch import nn

from piecegraph.errors import (
    NothingToCompile,
    Specialized,
    StateChanged,
    TraceFailed,
    TransformInForward,
    UnboundSymbol,
    UnknownCompiler,
)

from .models import Body, X, assert_right, marked_line, place

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


def logs(m, x):
    logging.getLogger("model").warning("tokens: %s", x)  # here
    return m.linear(x)


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
    (logs, "(?i)logg"),
    (disabled_call, "graph_break"),
    (branch_on_data, "Data-dependent branching"),
    (item_as_branch, "depends on a tensor's value. Could not guard on data-dependent"),
    (raises, "not this model"),
    (wrong_shapes, "same reduction dim"),
    (loop_over_tokens, "specializes on that size"),
    (size_as_key, "specializes on that size"),
]


@pytest.mark.parametrize(("body", "said"), FAULTS, ids=lambda each: getattr(each, "__name__", ""))
def test_error_names_the_line_and_gives_the_reason(compiled, body, said):
    with pytest.raises((TraceFailed, Specialized), match=said) as caught:
        compiled(Model(body), inputs=X)
    assert place(caught.value) == (__file__, marked_line(body, "# here"))
    assert caught.value.where in str(caught.value)


class Stateful(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.linear = body, nn.Linear(8, 8)
        self.calls, self.last, self.cache, self.rows = 0, None, {}, []
        self.register_buffer("state", torch.zeros(8))

    def forward(self, x, **kwargs):
        kwargs.pop("unused", None)
        return self.linear(self.body(self, x))


def value_of_last_step(m, x):
    before, m.last = m.last, x  # here
    return x if before is None else x + before


def attribute_that_may_be_missing(m, x):
    if hasattr(m, "scale"):
        x = x * m.scale
    m.scale = x.sum(0)  # here
    return x


def cache_in_a_dict(m, x):
    before = m.cache.get("keys", x)
    m.cache["keys"] = x  # here
    return x + before


def replaced_buffer(m, x):
    m.state = m.state + x.sum(0)  # here
    return x + m.state


CHANGES = [
    (value_of_last_step, "self.last"), (attribute_that_may_be_missing, "self.scale"),
    (cache_in_a_dict, "self.cache"), (replaced_buffer, "self"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "name"), CHANGES, ids=lambda each: getattr(each, "__name__", ""))
def test_tensors_kept_in_python_for_the_next_step_are_refused(compiled, body, name):
    model = Stateful(body)
    with pytest.raises(StateChanged, match=f"keeps tensors in {name} ") as caught:
        compiled(model, inputs=X)
    assert place(caught.value) == (__file__, marked_line(body, "# here"))
    assert (model.last, model.cache, hasattr(model, "scale")) == (None, {}, False)


TOTAL = 0


def test_other_changes_of_python_state_are_warnings_and_change_nothing(compiled):
    number = 0

    def body(m, x):
        global TOTAL
        nonlocal number
        m.last = x * 2
        m.calls += 1
        m.calls = 0  # what it was
        number += 1
        m.rows.append(len(m.rows))
        m.cache["last"] = x.shape[1]
        TOTAL = TOTAL + 1
        local = [m.last]
        local.append(1)
        return x

    model = Stateful(body)
    warnings = compiled(model, inputs=X).events.named("effect_dropped")
    changed = {warning.facts["changed"]: warning.facts["where"] for warning in warnings}
    first = body.__code__.co_firstlineno
    lines = {"self.last": 3, "self.body.__closure__[0]": 6, "self.rows": 7, "self.cache": 8}
    lines["TOTAL"] = 9
    assert changed == {name: f"{__file__}:{first + line}" for name, line in lines.items()}
    assert len(warnings) == len(lines)
    assert (model.last, model.calls, model.rows, number, TOTAL) == (None, 0, [], 0, 0)


def test_a_function_transform_is_refused_with_its_line(compiled):
    def body(m, x):
        return torch.vmap(lambda row: row * 2)(x)  # here

    with pytest.raises(TransformInForward) as caught:
        compiled(Model(body), inputs=X)
    assert place(caught.value) == (__file__, marked_line(body, "# here"))


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
    assert_right(made, model, [3])


def test_model_can_be_prepared_after_a_failed_attempt(compiled):
    with pytest.raises(TraceFailed):
        compiled(Model(branch_on_data), inputs=X)
    model = Model(lambda m, x: m.linear(x))
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(model, inputs=X)(x), model(x).detach())
