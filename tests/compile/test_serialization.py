"""Everything that a graph passes to an op survives a round trip through JSON."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compile.ir.serialization import Expr, Instance, Ref, decode, encode, refs
from piecegraph.errors import NotPortable


class Side(enum.Enum):
    LEFT = 1


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Word(enum.StrEnum):
    YES = "yes"


@dataclass
class Point:
    x: int


Pair = namedtuple("Pair", ["a", "b"])

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.builds(Ref, st.from_regex(r"t\d", fullmatch=True)),
    st.builds(Expr, st.from_regex(r"s\d\*2", fullmatch=True)),
    st.sampled_from([Side.LEFT, Bits.A, Word.YES, ...]),
    st.sampled_from([torch.float16, torch.strided, torch.sparse_csr, torch.channels_last]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
        st.builds(slice, inner, inner, inner),
        st.builds(lambda x: Instance(Point, {"x": x}), inner),
        st.builds(lambda a, b: Instance(Pair, {"a": a, "b": b}), inner, inner),
    ),
    max_leaves=8,
)


def same(one, other):
    """Equality that distinguishes 1 from True and 1.0, a Ref from a string, and 0.0 from -0.0."""
    if type(one) is not type(other):
        return False
    match one:
        case Instance():
            return one.kind is other.kind and same(one.fields, other.fields)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case dict():
            return same(list(one.items()), list(other.items()))
        case slice():
            return same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
        case float():
            return repr(one) == repr(other)
    return one == other


@given(VALUES)
def test_round_trip_through_json(value):
    assert same(decode(json.loads(json.dumps(encode(value), allow_nan=False))), value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 1e-320, complex(math.inf, -0.0)])
def test_numbers_at_the_edges(value):
    assert repr(decode(json.loads(json.dumps(encode(value), allow_nan=False)))) == repr(value)


def test_not_a_number():
    back = decode(json.loads(json.dumps(encode([math.nan]), allow_nan=False)))
    assert math.isnan(back[0])


@pytest.mark.parametrize("value", [object(), torch.zeros(1), len, {1, 2}, b"x", [object()]])
def test_what_cannot_be_rebuilt_is_refused(value):
    with pytest.raises(NotPortable):
        encode(value)


def test_class_that_cannot_be_found_by_name_is_refused():
    @dataclass
    class Local:
        x: int

    with pytest.raises(NotPortable, match="Local"):
        encode(Instance(Local, {"x": 1}))


@pytest.mark.parametrize(
    "data",
    [
        {"enum": ["os", "system", "x"]},
        {"enum": ["builtins", "dict", "x"]},
        {"record": ["subprocess", "Popen", [["args", "true"]]]},
        {"record": ["os", "system", []]},
        {"no such kind": 1},
    ],
)
def test_forged_data_cannot_name_other_code(data):
    with pytest.raises(NotPortable):
        decode(data)


@given(st.lists(st.builds(Ref, st.from_regex(r"t\d", fullmatch=True)), max_size=4))
def test_references_are_found_at_any_depth_in_order(names):
    nested = [OrderedDict(a=(name, [1, slice(None, name)])) for name in names]
    assert refs(nested) == [name for name in names for _ in range(2)]
