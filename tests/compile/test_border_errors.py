"""Mistakes in models and arguments are one-line errors with the user's file:line."""

import os

import pytest
import torch
from torch import nn

from piecegraph import prepare
from piecegraph.compile.ir.config import GuardPolicy
from piecegraph.config import Config, compile_config
from piecegraph.errors import (
    CompileError,
    FakeMissing,
    HostRead,
    InvalidSetting,
    NotPortable,
    Specialized,
    TraceFailed,
)

from .models import Body, X, marked_line, place

pytestmark = pytest.mark.compile

TWO = {"ids": "int64[num_tokens]", "positions": "int64[num_tokens]"}
OPS = torch.library.Library("border_tests", "DEF")
OPS.define("no_fake(Tensor x) -> Tensor")
OPS.impl("no_fake", torch.clone, "CPU")


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.place = nn.Embedding(64, 4)

    def forward(self, ids, positions):
        x = self.embed(ids) + self.place(positions)
        for _ in range(x.shape[0]):  # here
            x = x + 1
        return x


def test_size_that_became_a_number_is_located_where_it_did(compiled):
    """And not where two sizes were found equal."""
    with pytest.raises(Specialized) as caught:
        compiled(TwoInputs(), inputs=TWO)
    assert place(caught.value) == (__file__, marked_line(TwoInputs.forward, "# here"))


def test_stored_guards_do_not_depend_on_where_the_model_is(compiled):
    def even_check(m, x):
        return m.linear(x) if x.shape[0] < 500 else x

    made = compiled(Body(even_check), inputs=X, max_num_tokens=64)
    places = [guard.where for guard in made.plan.guards if guard.where]
    assert places
    assert not any(os.path.isabs(where) for where in places)


def reads_item(m, x):
    return m.linear(x) * x.sum().item()  # here


def reads_list(m, x):
    first, _ = x.sum(1).long()[:2].tolist()  # here
    return m.linear(x) + first


@pytest.mark.parametrize("policy", list(GuardPolicy))
@pytest.mark.parametrize("body", [reads_item, reads_list])
def test_value_read_on_the_host_is_refused_under_every_policy(compiled, body, policy):
    with pytest.raises((HostRead, TraceFailed)) as caught:
        compiled(Body(body), inputs=X, tracing={"guards": policy})
    assert place(caught.value)[1] == marked_line(body, "# here")
    if body is reads_item:
        assert isinstance(caught.value, HostRead)
        assert "item()" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [("flaot32[num_tokens]", "float32"), ("Tensor[num_tokens]", "'Tensor' is not a dtype")],
)
def test_unknown_dtype_names_the_nearest(text, said):
    with pytest.raises(InvalidSetting, match=said):
        compile_config(Config(inputs={"x": text}))


def test_other_name_of_a_dtype_is_the_same_dtype(compiled):
    made = compiled(Body(lambda m, x: m.linear(x)), inputs={"x": "float[num_tokens, 8]"})
    assert made.plan.inputs[0].dtype == "float32"


@pytest.mark.parametrize(
    "examples", [torch.zeros(5, 8), (torch.zeros(5, 8),), {"x": torch.zeros(5, 8)}]
)
def test_examples_must_be_arguments_of_a_call(compiled, examples):
    with pytest.raises(InvalidSetting, match=r"\(args, kwargs\)"):
        compiled(Body(lambda m, x: m.linear(x)), inputs=X, examples=examples)


def test_examples_that_do_not_fit_the_signature(compiled):
    with pytest.raises(InvalidSetting, match="too many positional arguments"):
        compiled(Body(lambda m, x: x), inputs=X, examples=((torch.zeros(5, 8), 1), {}))


def test_op_without_a_fake_says_so(compiled):
    body = lambda m, x: torch.ops.border_tests.no_fake(x)  # noqa: E731
    with pytest.raises(FakeMissing, match=r"border_tests.+no_fake.*register_fake") as caught:
        compiled(Body(body), inputs=X, splitting_ops=("border_tests::no_fake",))
    assert os.path.samefile(place(caught.value)[0], __file__)


class Opaque:
    def __init__(self, hidden):
        self.hidden = hidden


def test_result_of_a_plain_class_is_named_as_the_result(compiled):
    with pytest.raises(NotPortable, match=r"the model's result.*Opaque"):
        compiled(Body(lambda m, x: Opaque(m.linear(x))), inputs=X)


def test_settings_must_be_a_config():
    with pytest.raises(InvalidSetting, match=r"Config\(\*\*"):
        prepare(nn.Linear(4, 4), {"max_num_tokens": 4})


def test_unsupported_argument_names_argument_and_class(compiled):
    model = Body(lambda m, x: m.linear(x.hidden))
    with pytest.raises(
        CompileError, match=r"argument 'x' is an object of class .*Opaque"
    ) as caught:
        compiled(model, inputs={}, examples=((Opaque(torch.zeros(5, 8)),), {}))
    assert "Pass it as an argument" not in str(caught.value)
