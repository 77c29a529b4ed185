"""Random object graphs: one leaf changes, and the result still equals eager."""

import contextlib
import copy
import functools
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph.errors import BundleMissing
from tests.text_compiler import use_text_compiler

from ..starts import start

pytestmark = [pytest.mark.slow, pytest.mark.compile]

LEAVES = st.one_of(st.sampled_from([0.5, 1.5, 2.5]), st.integers(1, 4), st.booleans())
NAMES = st.sampled_from(["a", "b", "c"])
GRAPHS = st.recursive(
    LEAVES.map(lambda value: ("leaf", value)),
    lambda inner: st.one_of(
        st.tuples(st.just("list"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("tuple"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("dict"), st.dictionaries(NAMES, inner, min_size=1, max_size=3)),
        st.tuples(st.just("object"), st.dictionaries(NAMES, inner, min_size=1, max_size=3)),
        st.tuples(st.just("module"), st.dictionaries(NAMES, inner, min_size=1, max_size=2)),
        st.tuples(st.just("closure"), inner),
        st.tuples(st.just("partial"), inner),
        st.tuples(st.just("bound method"), inner),
        st.tuples(st.just("property"), inner),
    ),
    max_leaves=6,
)


class Holder:
    def __init__(self, held):
        self.held = held

    def give(self):
        return self.held

    @property
    def given(self):
        return self.held


class Inner(torch.nn.Module):
    pass


def give(held):
    return held


def closure(held):
    return lambda: held


def built(graph):
    """The object of a graph, and a function that sums what can be reached from it."""
    kind, content = graph
    if kind == "leaf":
        return content, lambda value: value
    if kind in ("list", "tuple"):
        parts = [built(each) for each in content]
        made = [value for value, _ in parts]
        reads = [read for _, read in parts]
        return (made if kind == "list" else tuple(made)), lambda value: sum(
            [read(value[i]) for i, read in enumerate(reads)]
        )
    if kind in ("dict", "object", "module"):
        named = {name: built(each) for name, each in content.items()}
        values = {name: value for name, (value, _) in named.items()}
        if kind == "dict":
            return values, lambda value: sum([r(value[n]) for n, (_, r) in named.items()])
        owner = types.SimpleNamespace() if kind == "object" else Inner()
        for name, value in values.items():
            setattr(owner, name, value)
        return owner, lambda value: sum([r(getattr(value, n)) for n, (_, r) in named.items()])
    inside, read = built(content)
    if kind == "closure":
        return closure(inside), lambda value: read(value())
    if kind == "partial":
        return functools.partial(give, inside), lambda value: read(value())
    if kind == "bound method":
        return Holder(inside).give, lambda value: read(value())
    return Holder(inside), lambda value: read(value.given)


def leaves(graph):
    kind, content = graph
    if kind == "leaf":
        return 1
    if isinstance(content, dict):
        return sum(map(leaves, content.values()))
    return sum(map(leaves, content)) if isinstance(content, list) else leaves(content)


def changed(graph, which):
    """`graph` with one more in the leaf numbered `which`."""
    remaining = [which]

    def visit(node):
        kind, content = node
        if kind == "leaf":
            remaining[0] -= 1
            return kind, content + 1 if remaining[0] == -1 else content
        if isinstance(content, dict):
            return kind, {name: visit(each) for name, each in content.items()}
        return kind, [visit(e) for e in content] if isinstance(content, list) else visit(content)

    return visit(copy.deepcopy(graph))


class Model(torch.nn.Module):
    def __init__(self, graph):
        super().__init__()
        self.root, self.read = built(graph)

    def forward(self, x):
        return x * self.read(self.root)


@pytest.mark.parametrize("examples", [6, pytest.param(300, marks=pytest.mark.heavy)])
def test_one_changed_leaf_never_gives_the_old_result(examples, tmp_path, monkeypatch):
    use_text_compiler(monkeypatch)
    x = torch.ones(3, 8)

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(graph=GRAPHS, data=st.data())
    def equals_eager(graph, data):
        which = data.draw(st.integers(0, leaves(graph) - 1))
        torch._dynamo.reset()
        model = Model(graph)
        assert torch.allclose(start(model, tmp_path)(x), model(x))
        assert start(Model(graph), tmp_path, bundle="force").hit
        model = Model(changed(graph, which))
        with contextlib.suppress(BundleMissing):
            made = start(model, tmp_path, bundle="force")
            assert torch.allclose(made(x), model(x)), graph

    equals_eager()
