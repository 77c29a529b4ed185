"""A model that is not traced: what its arguments and its result may be.

Forms of results are in test_models.py.
"""

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

from piecegraph.errors import ArgumentFixed, NotPortable, ResultFormUnknown

from .models import Body, X


def test_an_engine_may_replace_the_forward_by_one_that_runs_steps(compiled):
    model, x = Body(lambda m, x: m.linear(x)), torch.randn(7, 8)
    with torch.no_grad():
        expected = model(x)
        made = compiled(model, inputs=X, compile=False)
        model.forward = lambda x: made(x)
        torch.testing.assert_close(model(x), expected)
        model.linear.weight.zero_()  # the view of it has the same weights
        torch.testing.assert_close(model(x), model.linear.bias.expand(7, 8))


def test_number_that_varies_with_the_size_is_not_taken_for_a_constant(compiled):
    with pytest.raises(ResultFormUnknown, match="other values"):
        compiled(Body(lambda m, x: (x, x.shape[0])), inputs=X, compile=False)


def test_collection_of_another_class_is_refused(compiled):
    with pytest.raises(NotPortable, match="defaultdict"):
        compiled(Body(lambda m, x: defaultdict(list, a=x * 2)), inputs=X, compile=False)


def by_expert(m, x):
    result, expert = torch.zeros_like(x), (x[:, 0] > 0).long()
    for number in range(2):
        (rows,) = torch.where(expert == number)
        result.index_add_(0, rows, m.linear(x[rows]) * (number + 1))
    return result


def halved(m, x):
    return while_loop(lambda y: y.abs().amax() > 0.1, lambda y: (y * 0.5,), (x,))[0]


@pytest.mark.parametrize("forward", [by_expert, halved])
def test_sizes_inside_may_depend_on_data(compiled, forward):
    model = Body(forward)
    made = compiled(model, inputs=X, compile=False)
    for rows in (1, 7, 30):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(made(x), model(x))


@pytest.mark.parametrize(
    "forward", [lambda m, x: x[x[:, 0] > 0], lambda m, x: (x * 2, x.sum().item())]
)
def test_a_result_of_which_a_size_or_a_number_depends_on_data_is_refused(compiled, forward):
    with pytest.raises(ResultFormUnknown, match="a size or a number of it depends on data"):
        compiled(Body(forward), inputs=X, compile=False)


class Masked(nn.Module):
    def forward(self, x, mask=None):
        return x if mask is None else x * mask


def test_tensor_in_the_place_of_none_is_refused(compiled):
    made = compiled(Masked(), inputs=X, compile=False)
    x = torch.randn(3, 8)
    torch.testing.assert_close(made(x), x)
    with pytest.raises(ArgumentFixed, match="mask"):
        made(x, torch.zeros(8))
