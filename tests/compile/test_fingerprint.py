"""Content hash of a piece: it changes with everything code generation reads, and nothing else."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

from piecegraph.compile.conditions.values import Undescribable
from piecegraph.compile.pieces.fingerprint import canonical_text, fingerprint

from . import ops as _registers  # noqa: F401

CONSTANT = torch.arange(4.0)


def symbolic_mode():
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def size(mode: FakeTensorMode, name: str, hint: int = 17) -> torch.SymInt:
    """A fresh symbol; its name differs from environment to environment, as in real traces."""
    from torch._dynamo.source import ConstantSource

    env = mode.shape_env
    symbol = env.create_symbol(hint, ConstantSource(name))
    return env.create_symintnode(symbol, hint=hint)


class Maker:
    """Builds one small graph; each keyword changes one thing that code generation reads."""

    def __init__(self, **changed):
        self.changed = changed
        self.names = changed.pop("names", ("x", "w", "s"))
        self.mode = symbolic_mode()

    def get(self, name, default):
        return self.changed.get(name, default)

    def build(self):
        graph, root = Graph(), torch.nn.Module()
        root.constant = self.get("constant", CONSTANT)
        x, w, s = (graph.placeholder(name) for name in self.names)
        with self.mode:
            tokens = size(self.mode, self.names[2])
            rows = self.get("rows", lambda t: t)(tokens)
            values = {
                x: torch.empty_strided(
                    (rows, self.get("width", 4)),
                    self.get("stride", (4, 1)),
                    dtype=self.get("dtype", torch.float32),
                    device=self.get("device", "cpu"),
                ),
                w: torch.empty(4, 4, requires_grad=self.get("grad", False)),
                s: tokens,
            }
            if self.get("alias", False):
                values[w] = values[x][:4]
            offset = self.get("offset", 0)
            if offset:
                values[w] = torch.empty(20)[offset : offset + 16].view(4, 4)
        for node, value in values.items():
            node.meta["example_value"] = value
        weight = graph.get_attr("constant")
        first = graph.call_function(
            self.get("function", torch.add), (x, weight), self.get("kwargs", {"alpha": 2})
        )
        method = graph.call_method(self.get("method", "clamp"), (first, *self.get("args", (0, 1))))
        op = graph.call_function(self.get("op", torch.ops.piecegraph_test.fresh), (method, "name"))
        second = graph.call_function(torch.mm, (w, op) if self.get("swap", False) else (op, w))
        taken = graph.call_function(operator.getitem, (second, self.get("index", slice(0, s))))
        graph.output((taken, second) if self.get("outputs", False) else (taken,))
        return graph, root


def digest(**changed):
    return fingerprint(*Maker(**changed).build())


def test_same_graph_has_the_same_hash():
    assert digest() == digest()


def test_names_do_not_matter():
    assert digest(names=("a", "b", "c")) == digest(names=("l_x_", "weight", "s99"))


def test_locations_do_not_matter():
    graph, root = Maker().build()
    for node in graph.nodes:
        node.meta["stack_trace"] = 'File "/somewhere/else.py", line 3, in forward'
        node.meta["nn_module_stack"] = {"layers.7": ("layers.7", object)}
    assert fingerprint(graph, root) == digest()


CHANGES = {
    "dtype": {"dtype": torch.float64},
    "device": {"device": "meta"},
    "width": {"width": 5},
    "stride": {"stride": (8, 1)},
    "transposed": {"stride": (1, 4)},
    "size expression": {"rows": lambda t: t * 2},
    "static size": {"rows": lambda t: 17},
    "gradient": {"grad": True},
    "aliasing": {"alias": True},
    "storage offset": {"offset": 2},
    "operator": {"function": torch.sub},
    "keyword value": {"kwargs": {"alpha": 3}},
    "keyword type": {"kwargs": {"alpha": 2.0}},
    "keyword left out": {"kwargs": {}},
    "method": {"method": "clip"},
    "argument": {"args": (0, 2)},
    "argument type": {"args": (0, True)},
    "argument sign of zero": {"args": (-0.0, 1)},
    "argument float zero": {"args": (0.0, 1)},
    "infinite argument": {"args": (0, float("inf"))},
    "argument not a number": {"args": (0, float("nan"))},
    "order of arguments": {"swap": True},
    "custom op": {"op": torch.ops.piecegraph_test.scan},
    "overload": {"op": torch.ops.piecegraph_test.fresh.default},
    "index": {"index": 0},
    "slice": {"index": slice(0, 3)},
    "slice step": {"index": slice(0, None, 2)},
    "ellipsis": {"index": (..., 0)},
    "none index": {"index": (None, 0)},
    "outputs": {"outputs": True},
    "constant value": {"constant": torch.tensor([0.0, 1.0, 2.0, 4.0])},
    "constant dtype": {"constant": CONSTANT.int()},
    "constant shape": {"constant": CONSTANT.view(1, 4)},
    "constant number": {"constant": torch.tensor(3.0)},
}


def test_hash_follows_each_change_and_no_two_are_taken_for_each_other():
    seen = {digest(): "no change"}
    for name, change in CHANGES.items():
        assert seen.setdefault(digest(**change), name) == name


@given(st.sets(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=3), st.randoms())
def test_combinations_differ_from_the_original_and_not_from_themselves(chosen, random):
    changed = {}
    for name in sorted(chosen):
        changed |= CHANGES[name]
    names = [f"n{random.randrange(10**6)}_{i}" for i in range(3)]
    assert digest(**changed) != digest()
    assert digest(**changed) == digest(**changed, names=names)


def two_sizes(second):
    graph, mode = Graph(), symbolic_mode()
    with mode:
        a, b = size(mode, "a", 17), size(mode, "b", 19)
        for name, value in {"x": torch.empty(a, 4), "y": torch.empty(second(a, b), 4)}.items():
            graph.placeholder(name).meta["example_value"] = value
    graph.output(())
    return fingerprint(graph, torch.nn.Module())


def test_equal_sizes_are_not_taken_for_independent_ones():
    assert two_sizes(lambda a, b: a) != two_sizes(lambda a, b: b)
    assert two_sizes(lambda a, b: b) == two_sizes(lambda a, b: b)
    assert two_sizes(lambda a, b: a + b) != two_sizes(lambda a, b: b)


def op_text(op):
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(op, (x,)),))
    return canonical_text(graph, torch.nn.Module())


REGISTER = """
import torch
lib = torch.library.Library({namespace!r}, "DEF")
lib.define("f(Tensor{mark} x) -> Tensor")
lib.impl("f", lambda x: x + {number}, "CompositeExplicitAutograd")
"""


def registered(path, number=1, mark=""):
    """Canonical text of a call of an op that a file of its own registers."""
    path.write_text(REGISTER.format(namespace="pg_ops", number=number, mark=mark))
    scope = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    text = op_text(torch.ops.pg_ops.f)
    scope["lib"]._destroy()
    return text


def test_op_of_a_library_is_known_by_schema_and_by_the_file_that_registers_it(tmp_path):
    first = registered(tmp_path / "a.py")
    assert registered(tmp_path / "elsewhere.py") == first
    assert registered(tmp_path / "b.py", number=2) != first
    assert registered(tmp_path / "c.py", mark="(a!)") != first


def test_custom_op_is_known_by_the_source_of_its_function():
    def made(function):
        op = torch.library.custom_op("pg_custom::f", function, mutates_args=())
        op.register_fake(torch.empty_like)
        return op_text(torch.ops.pg_custom.f)

    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def plus_two(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    texts = [made(function) for function in (plus_one, plus_one, plus_two)]
    assert texts[0] == texts[1] != texts[2]


def test_nested_graphs_are_part_of_the_content():
    def nested(function):
        inner = Graph()
        inner.output(inner.call_function(function, (inner.placeholder("x"),)))
        root = torch.nn.Module()
        root.body = torch.fx.GraphModule({}, inner)
        outer = Graph()
        outer.output((outer.get_attr("body"),))
        return fingerprint(outer, root)

    assert nested(torch.sin) == nested(torch.sin)
    assert nested(torch.sin) != nested(torch.cos)


def test_what_inputs_that_share_memory_are_views_of_is_a_part_of_the_content():
    """AOTAutograd replaces them by it where one is written."""

    def of_views(whole, *more):
        graph = Graph()
        for value in (whole[0], whole[1], *more):
            graph.placeholder("value").meta["example_value"] = value
        graph.output(())
        return fingerprint(graph, torch.nn.Module())

    whole, other = torch.zeros(2, 8), torch.zeros(4, 8)
    assert of_views(whole) == of_views(other[:2].clone()) != of_views(other)
    assert of_views(whole) != of_views([each.data for each in whole])
    assert of_tensor(whole[0]) == of_tensor(other[0])  # alone it is what it is


class Other(TwoTensor):
    """Equal in form to the class that it is derived from."""


def of_tensor(tensor: torch.Tensor) -> str:
    graph = Graph()
    value = graph.placeholder("value")
    value.meta["example_value"] = tensor
    graph.output((value,))
    return fingerprint(graph, torch.nn.Module())


def test_a_class_of_tensors_is_a_part_of_the_digest():
    """Code that unwraps one class fails on, or is wrong for, another one of the same form."""
    one, two = torch.ones(2, 3), torch.ones(2, 3)
    assert of_tensor(TwoTensor(one, two)) == of_tensor(TwoTensor(two, one))
    assert of_tensor(TwoTensor(one, two)) != of_tensor(one)


def test_a_class_of_tensors_of_the_users_is_refused_by_name():
    """Its methods decide what is compiled, and nothing states their code."""
    with pytest.raises(Undescribable, match=r"test_fingerprint\.Other is a class of tensors"):
        of_tensor(Other(torch.ones(2), torch.ones(2)))
