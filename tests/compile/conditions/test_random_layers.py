"""Random stacks of layers: copied regions leave the trace that tracing each layer leaves."""

import contextlib
import copy
import functools
import itertools
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from piecegraph.errors import BundleMissing, CompileError
from tests.text_compiler import use_text_compiler

from ..models import MIX
from ..starts import start
from ..traces import expect_equal_traces, facts_of_trace, with_parts_off

pytestmark = [pytest.mark.slow, pytest.mark.compile]

TABLE = {"one": 1.0, "two": 2.0}


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.options = nn.Parameter(torch.linspace(0, 1, 8)), {"gain": 1.5}

    def forward(self, x):
        return torch.sigmoid(x * self.weight) * self.options["gain"]


def mixed(layer, x):
    out = torch.empty_like(x)
    torch.ops.piecegraph_test.mix(x, out, layer.name)
    return out


def projected(layer, x):
    one, two = layer.wide(x).chunk(2, dim=-1)
    return one + two.tanh().view(-1, 8)


def gated(layer, x):
    return x * layer.gate(x) + layer.gate.weight[0]


def counted(layer, x):
    layer.seen.add_(1)
    return x + layer.seen


def scaled(layer, x):
    for scale in layer.scales:
        x = x * scale
    return x if layer.flag else -x


def configured(layer, x):
    return x + layer.config.shift if layer.config.kind == "plain" else x.relu()


def called(layer, x):
    return layer.function(x)


def looked_up(layer, x):
    return x * TABLE[layer.key]


def viewed(layer, x):
    return (x + layer.tail).add_(layer.whole[4])


def optional(layer, x):
    return x + getattr(layer, "bonus", 0)


def sized(layer, x):
    return x.reshape(x.shape[0], 2, 4).transpose(1, 2).reshape(-1, 8)


PARTS = (
    *(mixed, projected, gated, counted, scaled, configured, called, looked_up, viewed, optional),
    sized,
)
CONFIG = types.SimpleNamespace(kind="plain", shift=0.5)


def closing(factor):
    return lambda x: x * factor


class Layer(nn.Module):
    def __init__(self, number, parts, results):
        super().__init__()
        self.parts, self.results = parts, results
        self.name, self.key, self.flag = f"layer.{number}", "two", True
        self.wide, self.gate = nn.Linear(8, 16), Gate()
        self.scales = [1.0, 0.5]
        self.config, self.function = CONFIG, torch.tanh
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("whole", torch.linspace(0, 1, 16))
        self.register_buffer("tail", self.whole[8:])

    def forward(self, x, residual=None, *, shift=0):
        x = x + shift if residual is None else x + residual
        first = x
        for part in self.parts:
            x = part(self, x)
        return x if self.results == 1 else (x, first)


class Doubled(Layer):
    def forward(self, x, residual=None, *, shift=0):
        return super().forward(x * 2, residual, shift=shift)


def tripled(module, inputs, output):
    return [each * 3 for each in output] if isinstance(output, tuple) else output * 3


def doubled(module, inputs):
    return inputs[0] * 2, *inputs[1:]


CHANGES = {
    "number": lambda layer, other: layer.scales.__setitem__(0, 3.0),
    "length": lambda layer, other: layer.scales.append(2.0),
    "tuple": lambda layer, other: setattr(layer, "scales", (1.0, 0.5)),
    "flag": lambda layer, other: setattr(layer, "flag", False),
    "key": lambda layer, other: setattr(layer, "key", "one"),
    "name": lambda layer, other: setattr(layer, "name", "another"),
    "same name": lambda layer, other: setattr(layer, "name", other.name),
    "config": lambda layer, other: setattr(
        layer, "config", types.SimpleNamespace(kind="plain", shift=2.0)
    ),
    "equal config": lambda layer, other: setattr(layer, "config", copy.copy(CONFIG)),
    "kind": lambda layer, other: setattr(
        layer, "config", types.SimpleNamespace(kind="relu", shift=0.5)
    ),
    "closure": lambda layer, other: setattr(layer, "function", closing(3.0)),
    "function": lambda layer, other: setattr(layer, "function", torch.sin),
    "hook": lambda layer, other: layer.register_forward_hook(tripled),
    "inner hook": lambda layer, other: layer.gate.register_forward_hook(tripled),
    "method": lambda layer, other: setattr(layer.gate, "forward", lambda x: x * 2),
    "bonus": lambda layer, other: setattr(layer, "bonus", 2),
    "zero bonus": lambda layer, other: setattr(layer, "bonus", 0),
    "tensor bonus": lambda layer, other: setattr(layer, "bonus", torch.ones(8)),
    "tied gate": lambda layer, other: setattr(layer, "gate", other.gate),
    "tied weight": lambda layer, other: setattr(layer.gate, "weight", other.gate.weight),
    "tied buffer": lambda layer, other: layer.register_buffer("seen", other.seen),
    "one tensor twice": lambda layer, other: layer.register_buffer("whole", layer.tail.repeat(2)),
    "a view of another": lambda layer, other: layer.register_buffer("tail", other.whole[8:]),
    "an own tail": lambda layer, other: layer.register_buffer("tail", torch.ones(8)),
    "gain": lambda layer, other: layer.gate.options.update(gain=2.5),
    "no bias": lambda layer, other: setattr(layer.wide, "bias", None),
    "eval": lambda layer, other: layer.gate.eval(),
    "frozen": lambda layer, other: layer.requires_grad_(False),
    "dtype": lambda layer, other: layer.gate.double(),
    "parts": lambda layer, other: setattr(layer, "parts", layer.parts[::-1]),
    "type": lambda layer, other: layer.scales.__setitem__(0, 1),
    "sign of zero": lambda layer, other: layer.scales.__setitem__(0, -0.0),
    "forward": lambda layer, other: setattr(
        layer, "forward", functools.partial(layer.forward, shift=3)
    ),
    "class": lambda layer, other: setattr(layer, "__class__", Doubled),
    "pre-hook": lambda layer, other: layer.register_forward_pre_hook(doubled),
    "submodule": lambda layer, other: setattr(layer, "wide", nn.Sequential(nn.Linear(8, 16))),
    "partial": lambda layer, other: setattr(
        layer, "function", functools.partial(torch.add, other=3)
    ),
    "strides": lambda layer, other: setattr(
        layer.wide, "weight", nn.Parameter(layer.wide.weight.detach().t().contiguous().t())
    ),
}


class Stack(nn.Module):
    def __init__(self, plan):
        super().__init__()
        torch.manual_seed(0)
        self.style = plan["style"]
        parts = [mixed, *(PARTS[i] for i in plan["parts"])]
        results = 2 if self.style == "residual" else 1
        self.layers = nn.ModuleList(Layer(i, parts, results) for i in range(plan["layers"]))
        for number, name in plan["changes"]:
            CHANGES[name](self.layers[number], self.layers[number - 1])

    def forward(self, x):
        x = x + 1
        residual = None
        for number, layer in enumerate(self.layers):
            if self.style == "residual":
                x, residual = layer(x, residual)
            elif self.style == "shifts":
                x = layer(x, shift=number // 2)
            elif self.style == "tensors":
                x = layer(x, shift=x if number % 2 else x * 2)
            elif self.style == "repeated":
                x = layer(layer(x))
            else:
                x = layer(x)
        return x if residual is None else (x, residual)


LAYERS = 5
PLANS = st.fixed_dictionaries(
    {
        "layers": st.just(LAYERS),
        "style": st.sampled_from(["plain", "plain", "residual", "shifts", "tensors", "repeated"]),
        "parts": st.lists(
            st.integers(1, len(PARTS) - 1), min_size=1, max_size=len(PARTS), unique=True
        ),
        "changes": st.lists(
            st.tuples(st.integers(1, LAYERS - 1), st.sampled_from([*CHANGES])), max_size=2
        ),
    }
)


X = torch.linspace(-1, 1, 24).reshape(3, 8)
ALIKE = {"layers": LAYERS, "style": "plain", "parts": range(1, len(PARTS)), "changes": ()}
"""Layers of all parts without a change."""


def is_right(made, model):
    with torch.no_grad():
        expected = copy.deepcopy(model)(X)
        found = made.compiled.link()(X)
    expected = expected if isinstance(expected, tuple) else (expected,)
    return all(map(functools.partial(torch.allclose, atol=1e-5, equal_nan=True), found, expected))


@pytest.mark.parametrize(
    "names", [["number", "hook"], pytest.param([*CHANGES], marks=pytest.mark.heavy)]
)
def test_a_change_of_one_layer_is_a_miss(names, tmp_path, monkeypatch):
    use_text_compiler(monkeypatch)
    settings = {"splitting_ops": MIX, "bundle": "force"}
    start(Stack(ALIKE), tmp_path, splitting_ops=MIX)
    assert start(Stack(ALIKE), tmp_path, **settings).hit
    wrong = []
    for name in names:
        torch._dynamo.reset()
        model = Stack({**ALIKE, "changes": [(2, name)]})
        with contextlib.suppress(BundleMissing):
            if not is_right(start(model, tmp_path, **settings), model):
                wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("examples", [1, pytest.param(200, marks=pytest.mark.heavy)])
def test_random_stacks(examples, tmp_path, monkeypatch):
    use_text_compiler(monkeypatch)
    roots = (tmp_path / str(number) for number in itertools.count())
    copied = 0

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(plan=PLANS, late=st.sampled_from([*CHANGES]))
    def equals_tracing_each(plan, late):
        nonlocal copied
        model = Stack(plan)
        try:
            copied += expect_equal_traces(model)
        except CompileError:
            with with_parts_off("faster"), pytest.raises(CompileError):
                facts_of_trace(model)
            return
        root = next(roots)
        assert is_right(start(model, root, splitting_ops=MIX), model)
        changed = Stack({**plan, "changes": [*plan["changes"], (LAYERS - 1, late)]})
        with contextlib.suppress(BundleMissing):
            assert is_right(start(changed, root, splitting_ops=MIX, bundle="force"), changed)

    equals_tracing_each()
    assert copied or examples == 1
