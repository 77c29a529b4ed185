"""What a function or a value can reach: other modules, and the identity of objects."""

from __future__ import annotations

import functools
import types
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph.torch_compat.faster.equal_layers.reachable import (
    is_python_class,
    knows_no_module,
    only_stores,
    reaches_only,
)

LINEAR = nn.Linear(2, 2)
SCALES = [1.0, 2.0]


class Plain:
    def __init__(self, held):
        self.held = held


class Slots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


class Queue(deque[Any]):
    """Holds what neither its `__dict__` nor a slot shows."""


def of_arguments(x):
    return x * SCALES[0]


def of_a_module(x):
    return LINEAR(x)


def of_identity(x):
    return id(x)


def with_default(x, layer=LINEAR):
    return layer(x)


def nested(x):
    return (lambda: LINEAR(x))()


def closure(over):
    return lambda x: over(x)


@pytest.mark.parametrize(
    ("function", "knows_none"),
    [
        *((of_arguments, True), (torch.nn.functional.silu, True)),
        *((of_a_module, False), (of_identity, False), (with_default, False), (nested, False)),
        *((closure(torch.sin), True), (closure(LINEAR), False), (closure(id), False)),
        *((of_identity.__code__, False), (of_arguments.__code__, True), (len, False)),
    ],
)
def test_what_a_function_knows(function, knows_none):
    assert knows_no_module(function) is knows_none


@pytest.mark.parametrize("held", [LINEAR, id, hash])
def test_what_a_value_reaches(held):
    ways = [
        lambda value: value,
        lambda value: {"key": [(value,)]},
        functools.partial(functools.partial, print),
        lambda value: types.MappingProxyType({"key": value}),
        Plain,
        Slots,
        lambda value: types.SimpleNamespace(held=value),
        lambda value: types.GenericAlias(list, (value,)),
        lambda value: int | types.GenericAlias(list, (value,)),
    ]
    assert not any(reaches_only(way(held)) for way in ways)
    assert all(reaches_only(way(1.0)) for way in ways)
    assert not reaches_only(Queue([1.0]))  # it cannot be known


def test_known_modules_may_be_reached():
    held, other = [LINEAR, 1.0], nn.Linear(2, 2)
    seen = {}
    assert reaches_only(held, [LINEAR, other], seen)
    assert [*seen.values()] == [held, LINEAR]
    assert not reaches_only(held, [other])


class Reading(Slots):
    def __getattr__(self, name):
        return self.held


class Setting(Plain):
    def __setattr__(self, name, value):
        SCALES.append(value)


class Property(Plain):
    held: Any = property(lambda self: 1, lambda self, value: SCALES.append(value))


class Looking(Plain):
    def __init__(self, held):
        self.held = held[0]


class Calling(Plain):
    def __init__(self, held):
        super().__init__(held)


class Making(Plain):
    def __new__(cls, held):
        return SCALES


class Replacing(type):
    def __call__(cls, held):
        return SCALES


class Replaced(Plain, metaclass=Replacing):
    pass


class Constant:
    def __init__(self, one, other=2):
        self.one = one
        self.other = other
        self.kind = "kind"


def test_classes_that_only_store():
    assert all(map(only_stores, (Plain, Constant)))
    others = Reading, Setting, Property, Looking, Calling, Making, Replaced, Queue, int
    assert not any(map(only_stores, others))


def test_classes_whose_objects_show_what_they_hold():
    assert all(map(is_python_class, (Plain, Slots, types.SimpleNamespace)))
    assert not any(map(is_python_class, (Queue, deque, int)))
