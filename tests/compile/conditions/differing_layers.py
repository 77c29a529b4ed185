"""Stacks of layers that look equal, of which one differs in something."""

from __future__ import annotations

import functools
import itertools
import operator
import types
from typing import Any

import torch
from torch import nn

from ..ops import define

define(
    "numbered(Tensor x, int layer) -> Tensor",
    lambda x, layer: x * layer,
    lambda x, layer: torch.empty_like(x),
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


KNOWN = []


def registered(model, layer, number):
    KNOWN[number:] = [layer]


class Outer(Stack):
    """A stack with a forward of its own."""

    def __init__(self, run):
        super().__init__()
        self.run, self.calls = run, [0]

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


def with_own(third, others, use):
    """A stack in which an attribute of the third layer differs."""
    return stack(
        lambda m, x: x * use(m.given, x),
        lambda _, m, n: setattr(m, "given", third if n == 2 else others),
    )


def marked(model, x):
    for number, layer in enumerate(model.layers):
        x = x + 1
        x.mark = number
        x = layer(x)
    return x


COUNTER = itertools.count()


def reading(read, run):
    model = stack(lambda m, x: x * read(m, x))
    outer = Outer(run)
    outer.layers = model.layers
    return outer


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


def with_properties(use):
    class Used(WithProperties):
        def before(self, x):
            return x * use(self, x)

    model = Stack(Used)
    for number, layer in enumerate(model.layers):
        layer.rank = number
    return model


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


def vars_before():
    model = numbered(lambda m, x: x * vars(m)["rank"])
    outer = Outer(lambda m, x: Stack.forward(m, x * sum(vars(each)["rank"] for each in m.layers)))
    outer.layers = model.layers
    return outer


def appended(state, number):
    if number == 0:
        state.seen = []
    state.seen.append(number)


MODELS = {
    "a number in a shape": lambda: stack(
        lambda m, x: x + x.view(-1, m.rank).sum(), lambda _, m, n: setattr(m, "rank", 2 + 2 * n)
    ),
    "a number times a size": lambda: numbered(lambda m, x: NUMBERED(x, x.shape[0] * m.rank)),
    "a limit of sizes": lambda: stack(
        lambda m, x: x * 3 if x.shape[0] > m.limit else x, lambda _, m, n: setattr(m, "limit", 64)
    ),
    "vars that were read before": lambda: vars_before(),
    "a number by isinstance": lambda: numbered(lambda m, x: x * 3 if isinstance(m, IsThird) else x),
    "a number by a property in C": lambda: with_properties(lambda m, x: m.third),
    "a state that grows": lambda: stated(lambda state: len(state.seen), appended),
    "the type in a set": lambda: with_own({1.5, 2}, {1.5, 2.0}, lambda own, x: sum(own)),
    "a float that is one object": lambda: with_own(
        (HALF, HALF), (HALF, float("0.5")), lambda own, x: 3 if own[0] is own[1] else 1
    ),
    "a mark on a tensor": lambda: reading(lambda m, x: x.mark, marked),
    "a shared iterator": lambda: stack(lambda m, x: x * next(COUNTER)),
    "a method of an object": lambda: of_objects(lambda n: Factor(n).apply),
    "a hook": changed(lambda layer: layer.register_forward_hook(tripled)),
    "strides": changed(
        lambda layer: setattr(
            layer.linear, "weight", nn.Parameter(layer.linear.weight.detach().t().contiguous().t())
        )
    ),
    "known by the class": lambda: stack(
        lambda m, x: x * 3 if m is type(m).options.known[2] else x,
        lambda _, m, n: vars(Layer.options).setdefault("known", []).append(m),
    ),
    "in a global list": lambda: stack(lambda m, x: x * 3 if m in KNOWN[2:] else x, registered),
    "the end of the name": lambda: stack(lambda m, x: x * 3 if m.name.endswith("2") else x),
    "autocast for one layer": lambda: modes(lambda third: torch.autocast("cpu", enabled=third)),
    "a counter in the model": lambda: Outer(counted),
    "the same tensor twice": lambda: with_arguments(lambda m, x, n: x if n % 2 else x + 1),
    "a constant result": lambda: returning(lambda x, y, factor: (x, y * 2, None, factor)),
    "written in place": lambda: stack(writes),
    "weights shared by layers": changed(lambda layer: tied(layer)),
}
