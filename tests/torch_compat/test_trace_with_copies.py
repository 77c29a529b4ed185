"""Equal modules are traced once; guards of the first are stated for each."""

import pytest
import torch
from torch import nn

from piecegraph.torch_compat.basics.facts import GuardFact
from piecegraph.torch_compat.faster.equal_layers.trace_with_copies import (
    copied_facts,
    trace_with_copies,
)
from piecegraph.torch_compat.tracing.dynamo import dynamo_tracing

pytestmark = [
    pytest.mark.compile,
    pytest.mark.needs_torch("2.13", "torch cannot move the place of a guard"),
]

NAMES = "none", "tanh", "none"


class Layer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.name, self.scale = name, 2.0

    def forward(self, x):
        return torch.ops.aten.gelu(x * self.weight, approximate=self.name).sin() + self.scale


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(name) for name in NAMES)

    def forward(self, x):
        x = x + 1  # else the first call has an argument of another form: an input of the graph
        for layer in self.layers:
            x = layer(x)
        return x


def captured(model):
    torch._dynamo.reset()
    with dynamo_tracing("backed"):
        trace = trace_with_copies(model, (torch.ones(3, 8),), {})
    assert trace.captured is not None
    return trace.captured, trace


def test_a_copied_region_has_its_own_weights_names_and_guards():
    model = Stack()
    found, trace = captured(model)
    assert trace.copied == 2
    calls = [node for node in found.graph.graph.nodes if "gelu" in str(node.target)]
    passed = [node.kwargs["approximate"] for node in calls]
    assert [(type(each), each) for each in passed] == [(str, name) for name in NAMES]
    inputs = found.graph.graph.find_nodes(op="placeholder")
    assert len(inputs) == 4  # of each layer, and the input
    guards = {(fact.expression, fact.kind) for fact in found.guards}
    for name, kind in {(e.replace("'0'", "'{}'"), k) for e, k in guards if "['0']" in e}:
        assert all((name.format(number), kind) in guards for number in range(3)), (name, kind)


def test_facts_of_a_copy_are_those_of_the_original():
    facts = [
        GuardFact("L['self'].a.x", "CONSTANT_MATCH"),
        GuardFact("L['self'].ab", "TYPE_MATCH"),
        GuardFact("L['self'].a.y", "DUPLICATE_INPUT", "L['self'].a.z"),
        GuardFact("L['self'].a.y", "DUPLICATE_INPUT", "L['self'].y"),  # not of each copy
    ]
    found = copied_facts(facts, [("L['self'].a", "L['self'].b"), ("L['self'].a", "L['self'].c")])
    assert {*found} == {
        *facts,
        *(GuardFact(f"L['self'].{n}.x", "CONSTANT_MATCH") for n in "bc"),
        *(GuardFact(f"L['self'].{n}.y", "DUPLICATE_INPUT", f"L['self'].{n}.z") for n in "bc"),
    }


def broken(*args):
    raise RuntimeError("no copies here")


@pytest.mark.parametrize("name", ["copy_region", "text"])
def test_what_fails_with_copies_is_traced_without(name, monkeypatch):
    from piecegraph.torch_compat.faster.equal_layers import calls

    monkeypatch.setattr(calls, name, broken)
    _, trace = captured(Stack())
    assert trace.copied == 0
    assert trace.failures == {"Stack": "RuntimeError: no copies here"}


@pytest.mark.parametrize(("kind", "method"), [("Match", "difference"), ("Region", "end")])
def test_a_check_that_fails_names_the_layer(kind, method, monkeypatch):
    from piecegraph.torch_compat.faster.equal_layers import calls

    monkeypatch.setattr(getattr(calls, kind), method, broken)
    _, trace = captured(Stack())
    assert trace.copied == 0
    layers = {f"L['self']._modules['layers']._modules['{number}']" for number in range(3)}
    assert trace.failures
    assert {*trace.failures} <= layers
    assert {*trace.failures.values()} == {"RuntimeError: no copies here"}
