"""Results whose sizes, or sizes that are results, are not one expression of those of the batch."""

import pytest
import torch
from torch import nn

from piecegraph import Batch
from piecegraph.errors import NotPortable, ResultFormUnknown, ReturnsShape

from ..conftest import Computes, captured, right_step

pytestmark = pytest.mark.compile

TABLE = torch.randn(8, 4)
FORMS = {
    "at most": lambda x: x[:4] * 2,
    "at least": lambda x: nn.functional.pad(x, (0, 0, 0, max(0, 8 - len(x)))),
    "a table": lambda x: (x * 2, TABLE[: len(x)] * 1),
    "one expression": lambda x: (x * 2, x.repeat_interleave(2, 0), TABLE * 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_cut_only_where_the_form_is_the_same_for_all_sizes(form):
    sizes = (1, 2, 4, 8, 16)
    prepared = captured(Computes(FORMS[form]), 16, compile=False, capture_sizes=sizes)
    modes = set()
    for n in range(1, 17):
        x = torch.randn(n, 4)
        decision = prepared.dispatch(Batch(n, n, is_decode=True, query_len=1))
        modes.add((n, decision.mode.name, decision.descriptor.num_tokens))
        torch.testing.assert_close(prepared.run(decision, x), FORMS[form](x))
    assert (16, "FULL", 16) in modes
    assert ((3, "FULL", 4) in modes) == (form == "one expression")


def test_values_that_are_other_ones_for_some_sizes_are_refused():
    def form(x):
        return x * 2, min(x.shape[0], 4)

    with pytest.raises(ResultFormUnknown, match="other values beside its tensors"):
        captured(Computes(form), 16, compile=False)


def test_values_that_only_a_step_has_are_refused_there():
    model = Computes(lambda x: (x * 2, model.name))
    model.name = "first"
    prepared = captured(model, 16, compile=False, graph_mode="NONE")
    assert prepared(torch.ones(2, 4), batch=Batch(2, 1))[1] == "first"
    model.name = "second"
    with pytest.raises(ResultFormUnknown, match="other values beside its tensors"):
        prepared(torch.ones(2, 4), batch=Batch(2, 1))


SIZES = {
    "size": lambda x: x.size(),
    "of a result": lambda x: (x * 2).shape,
    "a part": lambda x: x.shape[:1],
    "a new one": lambda x: torch.Size([x.shape[0] * 2, 8]),
    "as a tuple": lambda x: tuple(x.shape),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_that_a_traced_model_returns_are_those_of_the_step(sizes):
    model = Computes(lambda x: {"y": x * 2, "sizes": SIZES[sizes](x)})
    prepared = captured(model, 16, graph_mode="NONE")
    for n in (3, 16, 1):
        x = torch.randn(n, 4)
        result = prepared(x, batch=Batch(n, 1))
        assert (result["sizes"], result["y"].shape) == (SIZES[sizes](x), x.shape)


def test_the_shape_of_an_argument_is_refused_as_a_result():
    """Dynamo reads it from the argument, which in a trace is the example."""
    model = Computes(lambda x: (x * 2, {"shape": x.shape}))
    with pytest.raises(ReturnsShape, match=r"tuple\(x\.shape\)"):
        captured(model, 16, graph_mode="NONE")


NUMBERS = {
    "comparisons": lambda n: [n > 5, n == 16, (n > 2) & (n < 9)],
    "floats": lambda n: [n * 0.5, n / 3, float(n), n**0.5, round(n * 0.3, 1), (n - 9) // 2.0],
    "both": lambda n: {"few": n * 0.1 < 0.3, "all": n, "half": n * 0.5},
    "one number": lambda n: n / 2,
    "infinite": lambda n: n * float("inf"),
    # sympy makes 29.0 * n and 0.3 * n of them
    "in the order of the model": lambda n: (n * 0.29 * 100, int(n * 0.29 * 100), n * 0.1 * 3),
}


@pytest.mark.parametrize("numbers", NUMBERS)
def test_numbers_computed_from_sizes_are_those_of_the_step(numbers):
    model = Computes(lambda x: {"y": x * 2, "numbers": NUMBERS[numbers](x.shape[0])})
    prepared = captured(model, 16, capture_sizes=(4, 16))
    for n in (3, 16, 1, 4, 7):
        x = torch.randn(n, 4)
        decision = prepared.dispatch(Batch(n, n, is_decode=True, query_len=1))
        assert decision.mode.name == "FULL"
        result, expected = prepared.run(decision, x)["numbers"], NUMBERS[numbers](n)
        assert (result, repr(result)) == (expected, repr(expected))


def test_a_number_that_is_returned_and_read_after_a_splitting_op(temporary_op):
    """No piece passes it on: each computes it from the sizes."""
    twice = temporary_op(
        "result_sizes::twice", "(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like
    )

    def form(x):
        share = x.shape[0] / 3
        y = torch.ops.result_sizes.twice(x * share)
        return y * share + int(share), share, torch.scalar_tensor(share, dtype=torch.float64)

    prepared = captured(Computes(form), 16, graph_mode="NONE", splitting_ops=(twice,))
    pieces = [step.args for step in prepared.compiled.plan.steps if step.kind == "piece"]
    assert pieces == [("i0", "s0"), ("t1", "s0")]
    for n in (3, 16, 1):
        right_step(prepared, form, torch.randn(n, 4))


@torch.compiler.allow_in_graph
def half(n):
    return n * 0.5


def test_a_number_of_a_function_that_no_plan_can_call_is_refused_with_the_line():
    def form(x):
        return x * 2, half(x.shape[0])

    with pytest.raises(NotPortable, match=r"number of half\(\)") as caught:
        captured(Computes(form), 16, graph_mode="NONE")
    assert caught.value.where == f"{__file__}:{form.__code__.co_firstlineno + 1}"
