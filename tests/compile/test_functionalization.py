"""Readers of what a custom op mutates are moved before it where that saves a copy."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from piecegraph.compile.passes import functionalization

from . import ops  # noqa: F401  (registers the operators)
from .models import Function

MUTATES = torch.ops.higher_order.auto_functionalized_v2
OPS = torch.ops.piecegraph_test
aten = torch.ops.aten
# torch's own use of its deprecated pytree classes, by `torch.export`
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]


def functional(function, x):
    """The graph with mutating ops made functional, as Inductor's passes see it."""
    dims = {0: torch.export.Dim("num_tokens", min=2, max=1024)}
    program = torch.export.export(Function(function), (x,), dynamic_shapes={"x": dims})
    return program.run_decompositions({}).graph_module


def sink(graph):
    """Move every aten operator to just before its first user, as Inductor does for locality."""
    for node in reversed(list(graph.nodes)):
        if isinstance(node.target, torch._ops.OpOverload) and node.users:
            order = {each: index for index, each in enumerate(graph.nodes)}
            min(node.users, key=order.__getitem__).prepend(node)


def late_readers(graph):
    """Mutated tensors that Inductor copies since they, or their views, are read after the op."""
    nodes = list(graph.nodes)
    return sum(_late(nodes, op, base) for op in nodes for base in _bases(op))


def _bases(node):
    return node.kwargs["_all_bases"] if node.target is MUTATES else []


def _late(nodes, op, base):
    memory = base.meta["val"].untyped_storage()._cdata
    values = [node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    old = {node for node in values if node.meta["val"].untyped_storage()._cdata == memory}
    after = nodes[nodes.index(op) + 1 :]
    return any(given in old for node in after for given in node.all_input_nodes)


def gated(x):
    """Attention with a gate that is a view of what rotary embedding changes in place."""
    query, gate, key = (x @ x.T @ x).split(8, -1)
    gate = torch.sigmoid(gate)
    OPS.turn(query, key)
    return query * key * gate


def shared_expert(x):
    hidden = torch.relu(x)
    shared = torch.relu(hidden @ x.T) @ x
    OPS.accumulate(hidden, x)
    return hidden + shared


def widened(x):
    """The readers' own result is larger than a copy, the sum over it is not."""
    hidden = x * 2
    weight = (hidden[:, :, None] * torch.ones(1, 1, 5)).sum(-1)
    OPS.accumulate(hidden, x)
    return hidden + weight


def twice(x):
    first = x * 2
    before = first.sin()
    OPS.accumulate(first, x)
    between = first.cos()
    OPS.accumulate(first, x)
    return first + before + between


@pytest.mark.parametrize(
    ("function", "copies"), [(gated, 1), (shared_expert, 1), (widened, 1), (twice, 2)]
)
def test_readers_are_moved_ahead_of_the_op(function, copies):
    x = torch.randn(7, 24) / 5
    module = functional(function, x)
    sink(module.graph)
    assert late_readers(module.graph) == copies
    assert functionalization.apply(module.graph) == copies
    assert late_readers(module.graph) == 0
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(x)[-1], function(x.clone()))
    assert functionalization.apply(module.graph) == 0


def original_is_returned(graph, op, base):
    (output,) = graph.find_nodes(op="output")
    output.args = ((*output.args[0], base),)


def read_with_the_new_value(graph, op, base):
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        new = graph.call_function(aten.add.Tensor, (base, output.args[0][-1]))
    new.meta["val"] = base.meta["val"] + 1
    output.args = ((new,),)


def alias_is_read_behind_a_writer(graph, op, base):
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        view = graph.call_function(aten.slice.Tensor, (base, 1, 0, 2))
        view.meta["val"] = base.meta["val"][:, :2]
        graph.call_function(OPS.accumulate.default, (view, view))
        late = graph.call_function(aten.sin.default, (view,))
    late.meta["val"] = view.meta["val"].sin()
    output.args = ((late,),)


def result_is_larger_than_a_copy(graph, op, base):
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        wide = graph.call_function(aten.repeat.default, (base, [1, 3]))
    wide.meta["val"] = base.meta["val"].repeat(1, 3)
    output.args = ((wide,),)


def random_order_counts(graph, op, base):
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        late = graph.call_function(aten.bernoulli.default, (base,))
    late.meta["val"] = base.meta["val"] + 1
    output.args = ((late,),)


@pytest.mark.parametrize(
    "change",
    [
        original_is_returned,
        read_with_the_new_value,
        alias_is_read_behind_a_writer,
        result_is_larger_than_a_copy,
        random_order_counts,
    ],
)
def test_what_needs_the_copy_is_left_alone(change):
    def simple(x):
        hidden = x * 2
        OPS.accumulate(hidden, x)
        return hidden + 1

    graph = functional(simple, torch.randn(7, 24)).graph
    (op,) = graph.find_nodes(op="call_function", target=MUTATES)
    change(graph, op, _bases(op)[0])
    before = [node.name for node in graph.nodes]
    assert functionalization.apply(graph) == 0
    assert [node.name for node in graph.nodes] == before


VIEWS = [
    lambda base: base,
    lambda base: base[:, :12],
    lambda base: base[:, 8:20],
    lambda base: base.view(-1, 2, 12).transpose(0, 1),
    lambda base: base.select(1, 3),
]


def random_function(seed):
    """Values made from views of each other, some of which ops change in place in between."""
    choose = random.Random(seed)
    steps = [
        (choose.random(), choose.choice(VIEWS), choose.choice(["read", "scale", "ones", "sin"]))
        for _ in range(6)
    ]

    def function(x):
        values = [x * 2, x + 1]
        total = x.sum()
        for where, make_view, what in steps:
            base = values[int(where * len(values))]
            view = make_view(base)
            if what == "read":
                total = total + view.sin().sum()
            elif what == "scale":
                values.append(base * 0.5)
            else:
                added = torch.sin(view) if what == "sin" else torch.ones_like(view)
                OPS.accumulate(view, added)
        return torch.cat(values, -1) + total

    return function


@given(st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_rewritten_graph_computes_the_same(seed):
    function, x = random_function(seed), torch.randn(5, 24)
    module = functional(function, x)
    sink(module.graph)
    before = late_readers(module.graph)
    rewrites = functionalization.apply(module.graph)
    assert late_readers(module.graph) == before - rewrites
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(x)[-1], function(x))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(function, marks=pytest.mark.heavy)
        for function in (shared_expert, widened, twice, *map(random_function, range(3)))
    ],
)
def test_results_are_those_of_eager(compiled, function):
    made = compiled(Function(function), inputs=INPUTS, compiler="inductor")
    assert_equal(made, function)


INPUTS = {"x": "float32[num_tokens, 24]"}


def assert_equal(made, function):
    for size in (1, 2, 3, 7, 64):
        x = torch.randn(size, 24) / 5
        torch.testing.assert_close(made(x), function(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("on", [pytest.param(False, marks=pytest.mark.heavy), True])
def test_generated_code_has_a_copy_less(compiled, on):
    settings = {"compiler": "inductor", "codegen": {"passes": {"functionalization": on}}}
    made, sources = run_and_get_code(compiled, Function(gated), inputs=INPUTS, **settings)
    (code,) = [source for source in sources if "piecegraph_test.turn" in source]
    assert ("_clone_" in code) is not on
    assert [
        event.facts["rewrites"]
        for event in made.events.named("pass")
        if event.facts["graph_pass"] == "functionalization"
    ] == [1] * on
    assert_equal(made, gated)
