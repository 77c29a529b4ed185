"""Stacks of layers that make an object of their name, or share parts, of which one differs."""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn
from torch._library import opaque_object as opaque
from torch._opaque_base import OpaqueBaseMeta

from ..ops import define
from .differing_layers import COUNT, KINDS, Stack


class Label(metaclass=OpaqueBaseMeta):
    """The name of a layer, which Dynamo makes an input of the graph."""

    def __init__(self, text, other=""):
        self.text = text
        self.other = other

    def __eq__(self, other):
        return isinstance(other, Label) and vars(self) == vars(other)

    def __hash__(self):
        return hash(self.text)

    def __fx_repr__(self):
        kind = type(self)
        return f"{kind.__name__}({self.text!r}, {self.other!r})", {kind.__name__: kind}


class Counted(Label):
    """Its constructor changes the class."""

    made = 0

    def __init__(self, text, other=""):
        self.text = text
        self.other = other
        type(self).made = 0 if text == "layer.0" else self.made + 1


class Constant(Label):
    """Dynamo makes it a constant of the graph."""


class Shown(Label):
    """Fake operators may read its text."""


SHOWN = {"text": opaque.MemberType.USE_REAL}
for kind in (Label, Counted, Constant, Shown):
    members, hoist = SHOWN if kind is Shown else None, kind is not Constant
    opaque.register_opaque_type(kind, typ="value", hoist=hoist, members=members)


def _rows(x, label):
    return x[:, :4].clone() if label.text == "layer.2" else x.clone()


for kind in (Label, Counted, Constant, Shown):
    name, shown = kind.__name__, opaque.get_opaque_type_name(kind)
    define(
        f"kept_{name}(Tensor x, {shown} label) -> Tensor",
        lambda x, label: x.clone(),
        lambda x, label: torch.empty_like(x),
    )
    define(
        f"rows_{name}(Tensor x, {shown} label) -> Tensor",
        _rows,
        lambda x, label: torch.empty_like(_rows(x, label)),
    )
OPS = torch.ops.piecegraph_test


class Layer(nn.Module):
    kind: type[Label]
    op: str

    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number
        self.name, self.field = f"layer.{number}", "text"

    def forward(self, x):
        label = self.kind(self.name)
        y = getattr(OPS, self.op)(self.linear(x).relu() + 1, label)
        return self.use(y, label)

    def use(self, x, label):
        return x * 2


def stack(use, made=None, kind=Label):
    """A stack whose layers make a label of their name and call `use(layer, x, label)`."""

    class Used(Layer):
        def use(self, x, label):
            return use(self, x, label)

    Used.kind, Used.op = kind, f"kept_{kind.__name__}"
    model = Stack(Used)
    if made is not None:
        for number, layer in enumerate(model.layers):
            made(model, layer, number)
    return model


def changed_name():
    """A stack whose third layer has another name."""
    return stack(kept, lambda _, m, n: setattr(m, "name", "another") if n == 2 else None)


def kept(layer, x, label):
    return OPS.kept_Label(x, label) * 2


def made_again(layer, x, label):
    return OPS.kept_Label(x, Label(layer.name, "again")) * 2


class Part(nn.Module):
    """A part that layers may share, such as a table of positions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.factor, self.run = 2.0, self.scale

    def scale(self, x):
        return x * self.table * self.factor

    def forward(self, x):
        return self.run(x)


def sharing(use, third=lambda part: part):
    """A stack whose layers share a part, apart from the third, and know it by a global object."""
    model = stack(lambda m, x, _: use(m, x) * m.part(x))
    model.part = REGISTRY.part = Part()
    for number, layer in enumerate(model.layers):
        layer.part = third(model.part) if number == 2 else model.part
        layer.registry = REGISTRY
    return model


REGISTRY, GIVEN = types.SimpleNamespace(part=None), types.SimpleNamespace(first=())


def other_part(factor):
    part = Part()
    part.factor = factor
    return part


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.given, self.linear = (*KINDS,), nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x).relu() + 1
        return y * 3 if self.given is GIVEN.first else y


def nested():
    """A stack whose layers have a part that compares its own tuple with a global one, which is that
    of the third layer. Only the part of the second layer equals that of the first."""

    def made(_, layer, number):
        layer.block = Block()
        if number == 0:
            layer.field = "first"
        if number == 2:
            GIVEN.first = layer.block.given

    return stack(lambda m, x, _: m.block(x) * (2 if m.field == "first" else 5), made)


class Holder:
    def __init__(self, tensor):
        self.tensor = tensor


def with_tensors(use, third=lambda tensor: None):
    """A stack of which each layer has an object with a tensor, which Dynamo marks when read."""

    def made(_, layer, number):
        layer.holder = Holder(torch.full((8,), 2.0))
        if number == 2:
            third(layer.holder.tensor)

    return stack(lambda m, x, _: use(m, x), made)


class Op:
    """An operator that is an object, with the signature of its function."""

    def __init__(self, name, op, annotation):
        self.name, self.op, self.annotation = name, op, annotation

    def __call__(self, x):
        return self.op(x)


SINE = Op("sin", torch.ops.aten.sin.default, [Tensor | None, tuple[Tensor, Tensor]])


COPIED = {
    "a label that is passed": lambda: stack(kept),
    "two labels of a layer": lambda: stack(made_again),
    "a shared part": lambda: sharing(lambda m, x: x),
    "an operator that is an object": lambda: stack(lambda m, x, _: SINE(x)),
    "a tensor that is marked": lambda: with_tensors(lambda m, x: x * m.holder.tensor),
}
"""All but the first layer are copied, or all but two."""

TRACED = {
    "compared": lambda: stack(lambda m, x, label: x * 3 if label == Label("layer.2") else x),
    "the shape depends on it": lambda: stack(
        lambda m, x, label: x * OPS.rows_Shown(x, label).shape[1], kind=Shown
    ),
    "a constant of the graph": lambda: stack(lambda m, x, _: x, kind=Constant),
    "its class counts": lambda: stack(lambda m, x, _: x * Counted.made, kind=Counted),
    "a part of its own": lambda: sharing(
        lambda m, x: x * 3 if m.part is m.registry.part else x, lambda part: other_part(2.0)
    ),
    "another factor": lambda: sharing(lambda m, x: x, lambda part: other_part(3.0)),
    "a part that compares": nested,
    "a guarded address": lambda: with_tensors(
        lambda m, x: x * m.holder.tensor,
        lambda tensor: torch._dynamo.mark_static_address(tensor, guard=True),
    ),
}
"""What the third layer does otherwise: in each stack a copy of another layer would be wrong."""

assert COUNT > 3
