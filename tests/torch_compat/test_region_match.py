"""A module matches a region if it equals the module of the region."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph.torch_compat.dynamo import import_dynamo

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="torch cannot move the place of a guard"),
]


class Layer(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.linear, self.name, self.sizes = nn.Linear(2, 2), "layer.0", [1, {"more": (2.0,)}]
        for name, value in given.items():
            setattr(self, name, value)


SHARED = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("given", "alike"),
    [
        ({}, True),
        ({"name": "layer.1"}, True),  # it was only passed to operators
        ({"linear": SHARED}, True),
        ({"sizes": [1, {"more": (2,)}]}, False),
        ({"sizes": [1, {"less": (2.0,)}]}, False),
        ({"linear": nn.Linear(2, 2, bias=False)}, False),
        ({"linear": nn.Linear(2, 2).eval()}, False),
        ({"another": 1}, False),
        ({"training": False}, False),
        ({"forward": len}, False),
    ],
)
def test_modules_are_compared_by_value(given: dict[str, Any], alike: bool) -> None:
    import_dynamo()
    from torch._dynamo.source import AttrSource, LocalSource

    from piecegraph.torch_compat.region_match import Match
    from piecegraph.torch_compat.regions import Names, Region

    graph = SimpleNamespace(graph=torch.fx.Graph(), side_effects=SimpleNamespace())
    none = {"store_attr_mutations": {}, "__contains__": lambda self, value: False}
    graph.side_effects = type("Effects", (), none)()
    tx: Any = SimpleNamespace(output=graph)
    root = LocalSource("self")
    first, second = Layer(), Layer(**given)
    tx.output.root_tx = SimpleNamespace(f_locals={"self": [first, second]}, f_globals={})
    region = Region(first, AttrSource(root, "first"), [], tx)
    names = Names(passed={"L['self'].first.name"})
    assert Match(names, region, second, AttrSource(root, "second"), tx).holds() is alike
    names.inspected |= names.passed
    same = Match(names, region, second, AttrSource(root, "second"), tx).holds()
    assert same is (alike and second.name == first.name)
