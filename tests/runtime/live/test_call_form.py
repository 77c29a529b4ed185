"""A step whose call has another form than the traced one is an error, or right.

The model's result depends on everything in its arguments: classes, keys and their order, lengths,
flags. The oracle is the model itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from piecegraph import Batch, prepare
from piecegraph.errors import ArgumentClassUnknown, ArgumentFixed, InputMismatch, PiecegraphError

from ..conftest import small_config

ROWS = 3


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Fields:
    left: Any
    right: Any


torch.export.register_dataclass(Fields)


class Phase(Enum):
    PREFILL = 2
    DECODE = 3


def parts(value):
    """What a container holds, by key or position; nothing for a leaf."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, Fields):
        return list(vars(value).items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def number(value):
    """Depends on all of `value`, as a model may: of a tensor on its rows."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Enum):
        return float(value.value)
    total = float(sum(map(ord, type(value).__qualname__)) % 101)
    if isinstance(value, bool | int | float):
        return total + value
    for at, (key, item) in enumerate(parts(value)):
        total = total + number(item) * (at + 2.0) + sum(map(ord, str(key))) % 13
    return total


class Model(nn.Module):
    def forward(self, x, tree, mode=Phase.DECODE, **more):
        return x * 0.5 + number(tree) + number(mode) + number(more)


LEAVES = st.sampled_from(["tensor", "tensor", 1, True, 1.0, None, 2])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Fields, inner, inner),
    ),
    max_leaves=6,
)


def filled(tree):
    """`tree` with tensors, the same at each place."""
    if tree == "tensor":
        return torch.full((4,), 2.0)
    if isinstance(tree, dict):
        return type(tree)((key, filled(item)) for key, item in tree.items())
    if isinstance(tree, Pair | Fields):
        return type(tree)(filled(tree.left), filled(tree.right))
    return type(tree)(map(filled, tree)) if isinstance(tree, list | tuple) else tree


def changes(tree):
    """Trees that differ from `tree` in one thing."""
    changed = [] if tree == 1 and type(tree) is int else [1]
    if tree != "tensor":
        changed.append("tensor")
    if isinstance(tree, dict):
        kind = type(tree)
        changed += [kind({**tree, "more": "tensor"}), kind(reversed(list(tree.items())))]
        changed += [OrderedDict(tree) if kind is dict else dict(tree), list(tree.values())]
        for key in tree:
            changed.append(kind((k, v) for k, v in tree.items() if k != key))
            changed.append(kind((k + "x" if k == key else k, v) for k, v in tree.items()))
            changed += [kind({**tree, key: inner}) for inner in changes(tree[key])]
    elif isinstance(tree, Pair | Fields):
        left, right = tree.left, tree.right
        changed += [type(tree)(right, left), Pair(left, right), Fields(left, right), (left, right)]
        changed += [type(tree)(inner, right) for inner in changes(left)]
    elif isinstance(tree, list | tuple):
        kind = type(tree)
        changed += [kind([*tree, "tensor"]), kind(tree[1:]), tuple(tree), list(tree)]
        for at, item in enumerate(tree):
            changed += [kind([*tree[:at], inner, *tree[at + 1 :]]) for inner in changes(item)]
    return changed


def prepared_with(tree, **more):
    config = small_config(compile=False, graph_mode="NONE")
    return prepare(Model(), config, examples=((torch.ones(ROWS, 4), filled(tree)), filled(more)))


def run(prepared, tree, **more):
    """A step; fails if its result is not the model's."""
    x, tree, more = torch.rand(ROWS, 4), filled(tree), filled(more)
    got = prepared(x, tree, batch=Batch(ROWS, ROWS), **more)
    assert torch.equal(got, Model()(x, tree, **more))


class ReadsSizes(nn.Module):
    def forward(self, x, y, z):
        return x * (y.shape[0] + y.dtype.itemsize)


def test_sizes_of_a_tensor_of_which_a_trace_reads_nothing_else_are_compared():
    inputs = {"x": "float32[num_tokens, 4]", "z": "float32[num_tokens, 2]"}
    config = small_config(inputs=inputs, graph_mode="NONE")
    y, z = torch.ones(4), torch.ones(ROWS, 2)
    prepared = prepare(ReadsSizes(), config, examples=((torch.ones(ROWS, 4), y, z), {}))
    for rows in (ROWS, 2):
        x = torch.ones(rows, 4)
        assert prepared(x, y, z[:rows], batch=Batch(rows, rows)).unique().tolist() == [8.0]
    for other in (torch.ones(5), torch.ones(4).double(), torch.ones(4, 1)):
        with pytest.raises(InputMismatch, match=r"'y' is a .*\[.* a float32\[4\]"):
            prepared(torch.ones(ROWS, 4), other, z, batch=Batch(ROWS, ROWS))


@dataclass
class Derived(Fields):
    def __post_init__(self):
        self.derived = 1.0


torch.export.register_dataclass(Derived)


@pytest.mark.parametrize("kind", [Fields, Derived])
def test_an_attribute_that_is_set_on_a_dataclass_is_refused(kind):
    prepared = prepared_with(kind("tensor", 1))
    run(prepared, kind("tensor", 1))
    tree: Any = kind(torch.ones(4), 1)
    tree.extra = 2.0
    with pytest.raises(InputMismatch, match="with another attribute 'extra'"):
        prepared(torch.ones(ROWS, 4), tree, batch=Batch(ROWS, ROWS))


@given(TREES)
def test_a_call_of_another_form_is_refused_or_right(tree):
    """A model is prepared for each example, which takes most of the time: all changes are tried."""
    prepared = prepared_with(tree)
    run(prepared, tree)
    for changed in changes(tree):
        with suppress(PiecegraphError):
            run(prepared, changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tree": {"a": 1}}, r"'tree' is a dict with 'a', but .* a dict with 'a', 'b'"),
        ({"tree": {"b": "tensor", "a": 1}}, "a dict with 'b', 'a'"),
        ({"tree": {"a": 1, "b": "tensor", "c": 3}}, "a dict with 'a', 'b', 'c'"),
        ({"tree": OrderedDict(a=1, b="tensor")}, "a OrderedDict with 'a', 'b'"),
        ({"tree": {"a": True, "b": "tensor"}}, "'tree.a' is True, but .* traced with 1"),
        ({"tree": {"a": 1, "b": "tensor"}, "mode": Phase.PREFILL}, "'mode' is <Phase.PREFILL"),
        ({"tree": {"a": 1, "b": "tensor"}, "other": "tensor"}, "'more' is a dict with 'other'"),
    ],
)
def test_the_error_names_the_path(changed, message):
    prepared = prepared_with({"a": 1, "b": "tensor"})
    with pytest.raises((InputMismatch, ArgumentFixed), match=message):
        run(prepared, **changed)


def test_an_object_that_nothing_can_compare_is_refused():
    class Options:
        scale = 2.0

    with pytest.raises(ArgumentClassUnknown, match=r"'tree' is an object of class .*Options"):
        prepared_with(Options())


class Unread(nn.Module):
    """Its graph does not read the tensor that decides which it is."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x, mask=None, act=torch.relu):
        x = act(x) + self.one
        return x if mask is None else x * 2


@pytest.mark.compile
def test_what_the_graph_does_not_read_is_compared_too():
    config = small_config(graph_mode="NONE")
    x, mask = torch.rand(ROWS, 4), torch.ones(4)
    prepared = prepare(Unread(), config, examples=((torch.ones(ROWS, 4), mask), {}))
    assert torch.equal(prepared(x, mask, batch=Batch(ROWS, ROWS)), Unread()(x, mask))
    with pytest.raises(InputMismatch, match="'mask' is a NoneType, but .* a float32"):
        prepared(x, batch=Batch(ROWS, ROWS))
    with pytest.raises(ArgumentFixed, match="'act' is"):
        prepared(x, mask, torch.tanh, batch=Batch(ROWS, ROWS))


class Signed(nn.Module):
    def forward(self, x, bias=0.0):
        return x * math.copysign(1.0, bias)


@pytest.mark.parametrize("traced", [True, False])
def test_the_sign_of_zero_is_part_of_an_argument(traced):
    prepared = prepare(Signed(), small_config(4, compile=traced, graph_mode="NONE"))
    x = torch.ones(2, 4)
    assert prepared(x, 0.0, batch=Batch(2, 2)).unique().tolist() == [1.0]
    with pytest.raises(ArgumentFixed, match=r"-0\.0"):
        prepared(x, -0.0, batch=Batch(2, 2))
