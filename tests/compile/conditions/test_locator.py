"""Expressions of Dynamo's lead to places; most are found without parsing them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from piecegraph.compile.conditions.locator import Locator, Unlocatable
from tests.tables import tables_of


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.settings = {"a": [1, {"b.c": 2}], "d]": 3, "e[0]": (4, 5), 6: 7}
        self.itself = [self]

    def forward(self, x):
        return x


EXPRESSIONS = tables_of(__file__)


def locator(model):
    scopes = {"local_scope": {"self": model}, "global_scope": {"torch": torch}, "aliases": {}}
    captured = SimpleNamespace(**scopes)
    return Locator(model, captured)


def test_expressions_are_located_alike_alone_and_after_others():
    model = Model()
    together = locator(model)
    for expression in EXPRESSIONS["found"]:
        alone, found = locator(model), together.locate(expression)
        expected = alone.locate(expression)
        assert found.value is expected.value or found.value == expected.value
        assert (found.root, found.steps) == (expected.root, expected.steps), expression
        assert alone.aliases.items() <= together.aliases.items()
    for expression in EXPRESSIONS["missing"]:
        with pytest.raises(Unlocatable):
            together.locate(expression)


def test_names_of_a_wrapped_weight_are_read_and_other_methods_are_not_called():
    model = nn.Linear(2, 2)
    parts = TwoTensor(torch.ones(2, 2), torch.zeros(2, 2))
    model.weight = nn.Parameter(parts, requires_grad=False)
    weight = "L['self']._parameters['weight']"
    names = locator(model).locate(f"{weight}.__tensor_flatten__()[0]")
    assert names.value == ["a", "b"]
    with pytest.raises(Unlocatable):
        locator(model).locate(f"{weight}.zero_()")
    assert model.weight.a.sum() == 4
