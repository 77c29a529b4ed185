"""A module matches a region if it equals the module of the region."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from piecegraph.torch_compat.tracing.dynamo import import_dynamo

pytestmark = [
    pytest.mark.compile,
    pytest.mark.needs_torch("2.13", "torch cannot move the place of a guard"),
]


class Options:
    __slots__ = ("__dict__", "size")

    def __init__(self, size, **given):
        self.size = size
        vars(self).update(given)

    def method(self):
        return self.size


class Layer(nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.linear, self.name, self.sizes = nn.Linear(2, 2), "layer.0", [1, {"more": (2.0,)}]
        self.number, self.options = 7, Options(4)
        self.made = functools.partial(torch.add, other=2)
        self.method = self.options.method
        for name, value in given.items():
            setattr(self, name, value)


SHARED = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("given", "alike"),
    [
        ({}, True),
        ({"name": "layer.1"}, True),  # it was never read
        ({"number": 8}, True),
        ({"number": 8.0}, False),
        ({"made": functools.partial(torch.add, other=2)}, True),
        ({"made": functools.partial(torch.add, other=3)}, False),
        ({"made": functools.partial(torch.sub, other=2)}, False),
        ({"options": Options(4)}, False),  # the method is another object's
        ({"options": Options(5)}, False),
        ({"options": Options(4, one=Options(4))}, False),
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
def test_modules_are_compared_by_value(given, alike):
    import_dynamo()
    from torch._dynamo.source import AttrSource, LocalSource

    from piecegraph.torch_compat.faster.equal_layers.match import Match
    from piecegraph.torch_compat.faster.equal_layers.names import Names
    from piecegraph.torch_compat.faster.equal_layers.region import Region

    graph = SimpleNamespace(graph=torch.fx.Graph(), side_effects=SimpleNamespace())
    none = {"id_to_variable": {}, "store_attr_mutations": {}}
    graph.side_effects = type("Effects", (), {**none, "__contains__": lambda *_: False})()
    tx = SimpleNamespace(output=graph)
    root = LocalSource("self")
    first, second = Layer(), Layer(**given)
    scope = {"self": SimpleNamespace(first=first, second=second)}
    tx.output.root_tx = SimpleNamespace(f_locals=scope, f_globals={})
    region = Region(first, AttrSource(root, "first"), [], tx)
    match = Match(region, second, AttrSource(root, "second"), tx, Names(), {})
    assert (match.difference() is None) is alike
