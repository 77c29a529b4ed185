"""Stacks of layers that look equal, of which one differs in something."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import types
from typing import Any

import torch
from torch import nn

from ..ops import define

define(
    "named_rows(Tensor x, str layer) -> Tensor",
    lambda x, layer: x[:, :4].clone() if layer == "layer.2" else x.clone(),
    lambda x, layer: torch.empty_like(x[:, :4] if layer == "layer.2" else x),
)

define(
    "numbered(Tensor x, int layer) -> Tensor",
    lambda x, layer: x * layer,
    lambda x, layer: torch.empty_like(x),
)
define(
    "numbered_rows(Tensor x, int layer) -> Tensor",
    lambda x, layer: x[:, :layer].clone(),
    lambda x, layer: torch.empty_like(x[:, :layer]),
)
NUMBERED = torch.ops.piecegraph_test.numbered

COUNT = 4
"""The first layer adds guards on sizes, so that the second is the first that can be copied."""


class Factor:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return x * self.factor

    __call__ = apply


class Layer(nn.Module):
    options: Any = types.SimpleNamespace(gain=1.5)

    def __init__(self, number):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.Sequential(nn.LayerNorm(8), nn.ReLU())
        self.number = 7
        self.unread = number
        self.own, self.part = Factor(2), functools.partial(torch.mul, other=0.5)
        self.name = f"layer.{number}"
        self.scales = [2.0, {"more": 0.5}]

    def before(self, x):
        return x

    def forward(self, x):
        y = self.norm(self.linear(self.before(x))) * self.scales[0] + self.scales[1]["more"]
        y = NUMBERED(self.part(self.own.apply(y)), self.number)
        out = torch.empty_like(y)
        torch.ops.piecegraph_test.mix(y * self.options.gain, out, self.name)
        return x + out


class Stack(nn.Module):
    def __init__(self, layer=Layer):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer(i) for i in range(COUNT))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def stack(before, made=None):
    """A stack whose layers call `before(layer, x)` first."""

    class Changed(Layer):
        def before(self, x):
            return before(self, x)

    model = Stack(Changed)
    if made is not None:
        for number, layer in enumerate(model.layers):
            made(model, layer, number)
    return model


class TwoForms(Layer):
    def forward(self, x, first=False):
        return super().forward(x * self.given[0] if first else x)


def called_in_two_forms():
    """Only in its first call does the second layer read what the model has under another name."""
    model = Outer(lambda m, x: Stack.forward(m, m.layers[1](x * m.alias[0], True)))
    model.layers = nn.ModuleList(TwoForms(i) for i in range(COUNT))
    for layer in model.layers:
        layer.given = [2.0]
    model.alias = model.layers[1].given
    return model


FACTORS = {}
KNOWN = []


def registered(model, layer, number):
    FACTORS[layer] = FACTORS[str(number)] = float(number)
    KNOWN[number:] = [layer]


REGISTRY = types.SimpleNamespace(known=KNOWN)


def closing(before):
    known = []
    return stack(lambda m, x: before(m, x, known), lambda _, m, n: known.append(m))


def knows_parent(model, layer, number):
    layer.parent = [model]


def is_last(layer, x):
    return x * 3 if layer is layer.parent[0].layers[COUNT - 1] else x


class Outer(Stack):
    """A stack with a forward of its own."""

    def __init__(self, run):
        super().__init__()
        self.run, self.kinds, self.calls = run, [1, 1, 2, 1], [0]

    def forward(self, x):
        return self.run(self, x)


class WithArgument(Layer):
    def forward(self, x, other=None):
        y = super().forward(x)
        return y if other is None else y * other


def with_arguments(arguments):
    def run(model, x):
        for number, layer in enumerate(model.layers):
            x = layer(x, arguments(model, x, number))
        return x

    model = Outer(run)
    model.layers = nn.ModuleList(WithArgument(i) for i in range(COUNT))
    return model


def modes(mode):
    def run(model, x):
        for number, layer in enumerate(model.layers):
            with mode(number == 2):
                x = layer(x)
        return x

    return Outer(run)


def counted(model, x):
    for layer in model.layers:
        model.calls[0] += 1
        x = layer(x) * model.calls[0]
    return x


def returning(results):
    """A stack whose layers return several results, of which one is changed in place."""

    class Returns(Layer):
        def forward(self, x):
            y = super().forward(x)
            return results(x, y, self.factor)

    def run(model, x):
        for layer in model.layers:
            one, other, nothing, factor = layer(x + 1)
            other.mul_(2)
            x = one.flatten()[:8] + other.sum() * factor + (0 if nothing is None else nothing) + x
        return x

    model = Outer(run)
    model.layers = nn.ModuleList(Returns(i) for i in range(COUNT))
    for number, layer in enumerate(model.layers):
        layer.factor = 3 if number == 2 else 2
    return model


def writes(layer, x):
    y = x + 1
    layer.norm(y).add_(y)
    return y.mul_(2)


def changed(change):
    """A stack whose third layer is changed."""

    def make():
        model = Stack()
        change(model.layers[2])
        return model

    return make


def tied(layer):
    layer.linear.weight = layer.norm[0].weight = nn.Parameter(torch.ones(8, 8))


def tripled(module, inputs, output):
    return output * 3


class Doubled(Layer):
    def before(self, x):
        return x * 2


def set_name(layer, name):
    layer.name = name


CHANGES = {
    "a number": lambda layer: layer.scales.__setitem__(0, 3.0),
    "a number below": lambda layer: layer.scales[1].update(more=2.5),
    "the sign of zero": lambda layer: layer.scales[1].update(more=-0.0),
    "the type of a number": lambda layer: layer.scales.__setitem__(0, 2),
    "an attribute over the class": lambda layer: setattr(
        layer, "options", types.SimpleNamespace(gain=4.0)
    ),
    "a method": lambda layer: setattr(layer, "before", lambda x: x * 2),
    "the forward": lambda layer: setattr(layer, "forward", lambda x: x * 2),
    "the class": lambda layer: setattr(layer, "__class__", Doubled),
    "a hook": lambda layer: layer.register_forward_hook(tripled),
    "a hook below": lambda layer: layer.norm.register_forward_hook(tripled),
    "a hook before": lambda layer: layer.register_forward_pre_hook(lambda m, x: (x[0] * 2,)),
    "a submodule": lambda layer: setattr(layer.norm, "1", nn.Tanh()),
    "no bias": lambda layer: setattr(layer.linear, "bias", None),
    "the name": lambda layer: set_name(layer, "another"),
    "the number": lambda layer: setattr(layer, "number", 9),
    "an object": lambda layer: setattr(layer, "own", Factor(3)),
    "a number of an object": lambda layer: setattr(layer.own, "factor", 3),
    "a partial": lambda layer: setattr(layer, "part", functools.partial(torch.mul, other=3)),
    "a dtype": lambda layer: layer.norm[0].double().float().half().float(),
    "strides": lambda layer: setattr(
        layer.linear, "weight", nn.Parameter(layer.linear.weight.detach().t().contiguous().t())
    ),
    "a setting of a submodule": lambda layer: setattr(layer.norm[0], "eps", 0.5),
}


def with_own(third, others, use):
    """A stack in which an attribute of the third layer differs."""
    return stack(
        lambda m, x: x * use(m.given, x),
        lambda _, m, n: setattr(m, "given", third if n == 2 else others),
    )


def with_part_read_before():
    """A stack that reads a weight of its first layer by another name before it calls the layers."""
    model = Outer(lambda m, x: Stack.forward(m, x + m.first.bias))
    model.first = model.layers[0].linear
    return model


def marked(model, x):
    for number, layer in enumerate(model.layers):
        x = x + 1
        x.mark = number
        x = layer(x)
    return x


def in_global(model, x):
    for number, layer in enumerate(model.layers):
        CURRENT["number"] = number
        x = layer(x)
    return x


CURRENT = {"number": 0}
COUNTER = itertools.count()


def reading(read, run):
    model = stack(lambda m, x: x * read(m, x))
    outer = Outer(run)
    outer.layers = model.layers
    return outer


class Slotted(Layer):
    __slots__ = ("choice",)

    def before(self, x):
        return x * 3 if "three" in self.choice else x


def slotted():
    model = Stack(Slotted)
    for number, layer in enumerate(model.layers):
        layer.choice = {"three": 1} if number == 2 else {"other": 1}
    return model


def of_objects(make):
    return stack(lambda m, x: m.given(x), lambda _, m, n: setattr(m, "given", make(n)))


KINDS = [1, 2]
HALF = float("0.5")


def numbered(before):
    """A stack whose layers have other numbers, and call `before(layer, x)` first."""
    return stack(before, lambda _, m, n: setattr(m, "rank", n))


class Asked(type):
    """A metaclass that looks at an object: Dynamo calls it instead of tracing it."""

    def __instancecheck__(cls, value):
        return bool(value.rank == 2)


class IsThird(metaclass=Asked):
    pass


class WithProperties(Layer):
    third = property(operator.attrgetter("rank"))

    def __getattr__(self, name):
        return self.rank * 3 if name == "computed" else super().__getattr__(name)

    @property
    def doubled(self):
        return self.rank * 2

    @torch._dynamo.assume_constant_result
    def constant(self):
        return self.rank

    def extra_repr(self):
        return f"{self.rank}"


def with_properties(use):
    class Used(WithProperties):
        def before(self, x):
            return x * use(self, x)

    model = Stack(Used)
    for number, layer in enumerate(model.layers):
        layer.rank = number
    return model


class Holding(collections.deque[Any]):
    """A container whose items are not in its `__dict__`."""


HOLDING = Holding()


def is_held(layer, x):
    return x * 3 if layer is HOLDING[2] else x


def closing_over(factor):
    """A function that makes two functions of one variable."""
    return lambda: [lambda x: x * factor, lambda x: x + factor]


def by_closures(variables, factors):
    """A stack whose layers have two functions of a variable; layers of one letter share it."""
    own = (closing_over(float(repr(each))) for each in factors)  # each a number of its own
    make = dict(zip(variables, own, strict=True))
    return stack(
        lambda m, x: m.functions[1](m.functions[0](x)),
        lambda _, m, n: setattr(m, "functions", make[variables[n]]()),
    )


def of_parts(make, use):
    """A stack whose layers have equal objects; a variable of their method is that of the third."""
    held = [make() for _ in range(COUNT)]
    third = held[2]
    return stack(lambda m, x: use(m, x, third), lambda _, m, n: setattr(m, "given", held[n]))


def stated(read, run):
    """A stack of which each layer is called after `run(state, number)` has changed a state."""
    shared = Factor(2)

    def loop(model, x):
        for number, layer in enumerate(model.layers):
            run(model.state, number)
            x = layer(x)
        return x

    model = Outer(loop)
    model.layers = stack(
        lambda m, x: x * read(m.state), lambda _, m, n: setattr(m, "state", shared)
    ).layers
    model.state = shared
    return model


def matched(layer, x):
    match layer:
        case Layer(rank=2):
            return x * 3
    return x


def vars_before():
    model = numbered(lambda m, x: x * vars(m)["rank"])
    outer = Outer(lambda m, x: Stack.forward(m, x * sum(vars(each)["rank"] for each in m.layers)))
    outer.layers = model.layers
    return outer


def set_once(state, number):
    if number == 0:
        state.seen = 1


def set_third(state, number):
    if number == 2:
        state.factor = 3


def appended(state, number):
    if number == 0:
        state.seen = []
    state.seen.append(number)


MODELS = {
    "a number that is not read": lambda: numbered(lambda m, x: x),
    "a number in a condition": lambda: numbered(lambda m, x: x * 3 if m.rank == 2 else x),
    "a number as a size": lambda: numbered(lambda m, x: x + x.new_ones(m.rank + 1).sum()),
    "a number in a shape": lambda: stack(
        lambda m, x: x + x.view(-1, m.rank).sum(), lambda _, m, n: setattr(m, "rank", 2 + 2 * n)
    ),
    "the shape depends on the number": lambda: numbered(
        lambda m, x: x * torch.ops.piecegraph_test.numbered_rows(x, m.rank).shape[1]
    ),
    "a number in a text": lambda: numbered(lambda m, x: x * 3 if f"{m.rank}" == "2" else x),
    "a number times a size": lambda: numbered(lambda m, x: NUMBERED(x, x.shape[0] * m.rank)),
    "a limit of sizes": lambda: stack(
        lambda m, x: x * 3 if x.shape[0] > m.limit else x, lambda _, m, n: setattr(m, "limit", 64)
    ),
    "the largest of a number and a size": lambda: numbered(
        lambda m, x: NUMBERED(x, max(x.shape[0], 60 + m.rank))
    ),
    "a number that is matched": lambda: numbered(matched),
    "a number among the vars": lambda: numbered(
        lambda m, x: x * sum(v for v in vars(m).values() if type(v) is int)
    ),
    "vars that were read before": lambda: vars_before(),
    "a number by a getter": lambda: numbered(lambda m, x: x * operator.attrgetter("rank")(m)),
    "a number by isinstance": lambda: numbered(lambda m, x: x * 3 if isinstance(m, IsThird) else x),
    "a number by a property": lambda: with_properties(lambda m, x: m.doubled),
    "a number by a property in C": lambda: with_properties(lambda m, x: m.third),
    "a number by __getattr__": lambda: with_properties(lambda m, x: m.computed),
    "a number by a constant result": lambda: with_properties(lambda m, x: m.constant()),
    "the digits of a number": lambda: with_properties(lambda m, x: repr(m).count("2")),
    "a module in a deque": lambda: stack(
        is_held, lambda _, m, n: (HOLDING.clear() if n == 0 else None, HOLDING.append(m))
    ),
    "an object of a closure": lambda: of_parts(
        lambda: Factor(2), lambda m, x, third: m.given(x) * (3 if m.given is third else 1)
    ),
    "a method of a closure": lambda: of_parts(
        lambda: Factor(2).apply, lambda m, x, third: m.given(x) * (3 if m.given is third else 1)
    ),
    "a tuple of a closure": lambda: of_parts(
        lambda: (*KINDS,), lambda m, x, third: x * (3 if m.given is third else 1)
    ),
    "equal partials": lambda: of_parts(
        lambda: functools.partial(torch.mul, other=2), lambda m, x, third: m.given(x)
    ),
    "a number of an object": lambda: stack(
        lambda m, x: x * m.given.factor, lambda _, m, n: setattr(m, "given", Factor(n))
    ),
    "a state that is set once": lambda: stated(lambda state: state.factor, set_once),
    "a state that is set for one": lambda: stated(lambda state: state.factor, set_third),
    "a state that grows": lambda: stated(lambda state: len(state.seen), appended),
    "the type in a set": lambda: with_own({1.5, 2}, {1.5, 2.0}, lambda own, x: sum(own)),
    "the factory of a dict": lambda: with_own(
        collections.defaultdict(lambda: 3),
        collections.defaultdict(lambda: 1),
        lambda own, x: own[2],
    ),
    "a list that is a global one": lambda: with_own(
        KINDS, [*KINDS], lambda own, x: 3 if own is KINDS else 1
    ),
    "a float that is one object": lambda: with_own(
        (HALF, HALF), (HALF, float("0.5")), lambda own, x: 3 if own[0] is own[1] else 1
    ),
    "a float that is a global one": lambda: with_own(
        HALF, float("0.5"), lambda own, x: 3 if own is HALF else 1
    ),
    "a part that the model reads before": with_part_read_before,
    "the order of a dict": lambda: with_own(
        {"a": 1, "b": 2}, {"b": 2, "a": 1}, lambda own, x: next(iter(own.values()))
    ),
    "a gradient": lambda: stack(
        lambda m, x: x if m.linear.weight.grad is None else x * 3,
        lambda _, m, n: setattr(m.linear.weight, "grad", m.linear.weight * 2 if n == 2 else None),
    ),
    "a mark on a tensor": lambda: reading(lambda m, x: x.mark, marked),
    "a global that is written": lambda: reading(lambda m, x: CURRENT["number"], in_global),
    "a shared iterator": lambda: stack(lambda m, x: x * next(COUNTER)),
    "a random tensor": lambda: stack(lambda m, x: x * torch.rand(8)),
    "a dict in a slot": slotted,
    "a method of an object": lambda: of_objects(lambda n: Factor(n).apply),
    **{f"changed: {name}": changed(change) for name, change in CHANGES.items()},
    "the last of a list": lambda: stack(is_last, knows_parent),
    "known by a closure": lambda: closing(lambda m, x, known: x * 3 if m is known[2] else x),
    "known by a default": lambda: stack(
        lambda m, x, known=KNOWN: x * 3 if m is known[2] else x, registered
    ),
    "known by an object": lambda: stack(
        lambda m, x: x * 3 if m is REGISTRY.known[2] else x, registered
    ),
    "known by the class": lambda: stack(
        lambda m, x: x * 3 if m is type(m).options.known[2] else x,
        lambda _, m, n: vars(Layer.options).setdefault("known", []).append(m),
    ),
    "a weight that another layer reads": lambda: stack(
        lambda m, x: x * 3 if m.linear.weight is KNOWN[0].linear.bias else x + m.linear.weight[0],
        lambda model, m, n: (
            registered(model, m, n),
            setattr(m.linear, "weight", KNOWN[0].linear.weight) if n == 2 else None,
        ),
    ),
    "in a global list": lambda: stack(lambda m, x: x * 3 if m in KNOWN[2:] else x, registered),
    "a global table by name": lambda: stack(lambda m, x: x * FACTORS[m.name[-1]], registered),
    "the end of the name": lambda: stack(lambda m, x: x * 3 if m.name.endswith("2") else x),
    "the name as a number": lambda: stack(
        lambda m, x: x * int(m.name), lambda _, m, n: set_name(m, str(n))
    ),
    "the name is formatted": lambda: stack(lambda m, x: x * 3 if f"{m.name}." == "layer.2." else x),
    "the name of an attribute": lambda: stack(
        lambda m, x: x * getattr(m, m.name),
        lambda _, m, n: (
            (set_name(m, f"a{n}"), setattr(m, "a2", 3), setattr(m, "a0", 1))
            and [setattr(m, f"a{i}", i) for i in range(COUNT)]
        ),
    ),
    "the shape depends on the name": lambda: stack(
        lambda m, x: x * torch.ops.piecegraph_test.named_rows(x, m.name).shape[1]
    ),
    "identity as a number": lambda: stack(
        lambda m, x: x * (3 if id(m) == id(KNOWN[2]) else 1), registered
    ),
    "autocast for one layer": lambda: modes(lambda third: torch.autocast("cpu", enabled=third)),
    "inference mode for one layer": lambda: modes(
        lambda third: torch.inference_mode() if third else contextlib.nullcontext()
    ),
    "a counter in the model": lambda: Outer(counted),
    "an argument that counts": lambda: with_arguments(lambda m, x, n: n + 1),
    "an argument of a list": lambda: with_arguments(lambda m, x, n: m.kinds[n]),
    "an argument that knows": lambda: with_arguments(
        lambda m, x, n: 3 if m.layers[n] is m.layers[2] else 1
    ),
    "the same tensor twice": lambda: with_arguments(lambda m, x, n: x if n % 2 else x + 1),
    "another dtype": lambda: with_arguments(lambda m, x, n: x.bfloat16() if n == 2 else x + 1),
    "results that are views": lambda: returning(lambda x, y, _: (y, y.view(-1), None, 1)),
    "a result that is part of another": lambda: returning(lambda x, y, _: (y[1:], y[:1], None, 1)),
    "a constant result": lambda: returning(lambda x, y, factor: (x, y * 2, None, factor)),
    "written in place": lambda: stack(writes),
    "weights shared by layers": changed(lambda layer: tied(layer)),
    "an attribute that is absent": lambda: stack(
        lambda m, x: x * m.bonus if hasattr(m, "bonus") else x,
        lambda _, m, n: setattr(m, "bonus", 3) if n == 2 else None,
    ),
}
