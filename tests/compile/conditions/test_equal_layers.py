"""A layer that differs from the others in anything is traced, and its change is a miss."""

import contextlib

import pytest
import torch

from piecegraph.errors import BundleMissing, CompileError, TraceFailed
from tests.text_compiler import use_text_compiler

from ..models import MIX
from ..starts import start
from ..traces import expect_equal_traces
from . import named_layers
from .differing_layers import (
    COUNT,
    KNOWN,
    MODELS,
    Layer,
    Stack,
    by_closures,
    called_in_two_forms,
)

pytestmark = [pytest.mark.slow, pytest.mark.compile]


@pytest.fixture(autouse=True)
def _text(monkeypatch):
    use_text_compiler(monkeypatch)
    KNOWN.clear()
    vars(Layer.options).pop("known", None)


def each_time(names, cheap):
    """Cases of which all but some are heavy."""
    heavy = pytest.mark.heavy
    return [pytest.param(each, marks=() if each in cheap else heavy) for each in names]


def begin(model, root, **settings):
    torch._dynamo.reset()
    return start(model, root, **{"splitting_ops": MIX, **settings})


def test_equal_layers_are_traced_once():
    copied = expect_equal_traces(Stack())
    assert copied == (COUNT - 2 if torch.__version__ >= "2.13" else 0)


@pytest.mark.needs_torch("2.13", "layers are not copied")
def test_a_layer_that_compares_a_size_with_its_number_is_copied():
    assert expect_equal_traces(MODELS["a limit of sizes"]()) == COUNT - 2


EACH_TIME = (
    *("a hook", "the end of the name", "autocast for one layer"),
    *("in a global list", "a float that is one object"),
)


@pytest.mark.parametrize("name", each_time(MODELS, EACH_TIME))
def test_a_layer_that_differs_is_traced(name):
    with contextlib.suppress(CompileError):  # not to be traced, which is no wrong result
        expect_equal_traces(MODELS[name]())


@pytest.mark.parametrize("variables", each_time(["abcd", "aaaa", "aabb"], ["aabb"]))
def test_a_variable_of_several_functions_is_compared_in_each(variables, tmp_path):
    factors = [2.0] * COUNT
    begin(by_closures(variables, factors), tmp_path)
    assert begin(by_closures(variables, factors), tmp_path, bundle="force").hit
    for number in (2, 3):
        letters = f"{variables[:number]}z{variables[number + 1 :]}"
        model = by_closures(letters, [3.0 if each == "z" else 2.0 for each in letters])
        with pytest.raises(BundleMissing):
            begin(model, tmp_path, bundle="force")


def test_facts_of_another_call_of_a_layer_are_not_those_of_its_copies(tmp_path):
    begin(called_in_two_forms(), tmp_path)
    assert begin(called_in_two_forms(), tmp_path, bundle="force").hit


ONCE = "a label that is passed", "a shared part", "a tensor that is marked"
OTHERWISE = (
    *("compared", "the shape depends on it", "a constant of the graph", "its class counts"),
    "a part that compares",
)


@pytest.mark.parametrize("name", each_time(named_layers.COPIED, ONCE))
def test_layers_with_objects_of_their_name_are_traced_once(name):
    copied = expect_equal_traces(named_layers.COPIED[name](), splitting_ops=())
    assert copied == (COUNT - 2 if torch.__version__ >= "2.13" else 0)


@pytest.mark.parametrize("name", each_time(named_layers.TRACED, OTHERWISE))
def test_a_layer_that_uses_its_name_otherwise_is_traced(name):
    with contextlib.suppress(TraceFailed):  # which is no wrong result
        expect_equal_traces(named_layers.TRACED[name](), splitting_ops=())


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("a label that is passed", named_layers.changed_name),
        ("a shared part", named_layers.TRACED["another factor"]),
        pytest.param(
            *("a shared part", named_layers.TRACED["a part of its own"]), marks=pytest.mark.heavy
        ),
    ],
)
def test_a_change_of_a_name_or_a_part_is_a_miss(first, then, tmp_path):
    settings = {"splitting_ops": ("piecegraph_test::kept_Label",), "bundle": "force"}
    begin(named_layers.COPIED[first](), tmp_path, **{**settings, "bundle": "use"})
    assert begin(named_layers.COPIED[first](), tmp_path, **settings).hit
    with pytest.raises(BundleMissing):
        begin(then(), tmp_path, **settings)
