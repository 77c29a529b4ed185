"""A model that is not traced: what its arguments and its result may be.

Forms of results are in test_models.py.
"""

from collections import defaultdict

import pytest
import torch
from torch import nn

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


class Masked(nn.Module):
    def forward(self, x, mask=None):
        return x if mask is None else x * mask


def test_tensor_in_the_place_of_none_is_refused(compiled):
    made = compiled(Masked(), inputs=X, compile=False)
    x = torch.randn(3, 8)
    torch.testing.assert_close(made(x), x)
    with pytest.raises(ArgumentFixed, match="mask"):
        made(x, torch.zeros(8))
