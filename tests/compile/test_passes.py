"""Passes: what each rewrites, unchanged results, and how passes are chosen and keyed."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from piecegraph.compile.bundle.key_factors import codegen_key, machine_key
from piecegraph.compile.ir.config import GraphPass
from piecegraph.compile.passes import no_op
from piecegraph.compile.passes.graph_pass import passes_up_to, thresholds
from piecegraph.config import Config, compile_config
from piecegraph.errors import InvalidSetting
from piecegraph.tools.passes import add_rms_norm, silu_and_mul
from piecegraph.tools.passes.matching import Either, Op, match

aten = torch.ops.aten
prims = torch.ops.prims
CPU = torch.device("cpu")


def lowered(function, *inputs) -> torch.fx.GraphModule:
    """The graph that a post-grad pass sees, by Inductor's own decompositions."""
    from torch._inductor.decomposition import select_decomp_table

    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(
        *inputs
    )


def targets(graph: torch.fx.GraphModule) -> list[object]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def rewritten(module, function, *inputs) -> tuple[int, torch.fx.GraphModule]:
    """Apply a pass, and check that the graph still computes what `function` does."""
    graph = lowered(function, *inputs)
    rewrites = module.apply(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(*inputs), function(*inputs))
    return rewrites, graph


def llama(x, r, w):
    total = x + r
    wide = total.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * scaled.to(total.dtype), total


def reference(x, r, w):
    total = r + x
    wide = total.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w


def by_product(x, r, w):
    total = x + r
    wide = total.float()
    return w * (torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * wide).to(x.dtype)


def no_residual(x, r, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) + r


def gemma(x, r, w):
    wide = (x + r).float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (scaled * (1.0 + w.float())).to(x.dtype)


def over_tokens(x, r, w):
    wide = (x + r).float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + 1e-6)).to(x.dtype)


def scaled_residual(x, r, w):
    wide = torch.add(x, r, alpha=2).float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


DTYPES = [torch.float32, torch.bfloat16]
LEFT_ALONE = [gemma, over_tokens, no_residual, scaled_residual]


@pytest.mark.compile
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [llama, reference, by_product])
def test_add_rms_norm_is_found(function, dtype):
    inputs = (
        torch.randn(5, 8, dtype=dtype),
        torch.randn(5, 8, dtype=dtype),
        torch.randn(8).to(dtype),
    )
    rewrites, graph = rewritten(add_rms_norm, function, *inputs)
    assert rewrites == 1
    assert torch.ops.piecegraph.add_rms_norm.default in targets(graph)
    assert aten.rsqrt.default not in targets(graph)


def tokens(dtype=torch.float32):
    return torch.randn(5, 8).to(dtype)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("function", "x", "weight"),
    [
        *((function, tokens(), torch.randn(8)) for function in LEFT_ALONE),
        pytest.param(llama, tokens(), tokens(), id="a weight a row"),
        pytest.param(llama, tokens(torch.bfloat16), torch.randn(8), id="a weight of another dtype"),
    ],
)
def test_other_norms_are_left_alone(function, x, weight):
    assert rewritten(add_rms_norm, function, x, torch.randn_like(x), weight)[0] == 0


@pytest.mark.compile
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "function",
    [
        lambda g, u: F.silu(g) * u,
        lambda g, u: u * F.silu(g),
        lambda g, u: torch.relu(F.silu(g) * u) + g,
    ],
)
def test_silu_and_mul_is_found(function, dtype):
    inputs = torch.randn(5, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    rewrites, graph = rewritten(silu_and_mul, function, *inputs)
    assert rewrites == 1
    assert torch.ops.piecegraph.silu_and_mul.default in targets(graph)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda g, u: F.gelu(g) * u, torch.float32),
        (lambda g, u: F.silu(g) * u[0], torch.float32),
        (lambda g, u: torch.sigmoid(g) * u, torch.float32),
        (lambda g, u: F.silu(g) * u.double(), torch.float32),
        (lambda g, u: F.silu(g.float()).half() * u, torch.bfloat16),
    ],
)
def test_other_activations_are_left_alone(function, dtype):
    assert rewritten(silu_and_mul, function, tokens(dtype), tokens(dtype))[0] == 0


@pytest.mark.compile
def test_operators_without_effect_are_removed():
    def function(x):
        y = aten.view.default(x, [5, 8])
        y = aten.slice.Tensor(y, 0, 0, 9223372036854775807)
        y = prims.convert_element_type.default(y, torch.float32)
        return aten.expand.default(y, [5, 8]) + 1

    rewrites, graph = rewritten(no_op, function, torch.randn(5, 8))
    assert rewrites >= 3
    assert targets(graph) == [aten.add.Tensor]


@pytest.mark.compile
def test_operators_with_effect_stay():
    def function(x):
        y = aten.view.default(x, [8, 5])
        y = aten.slice.Tensor(y, 0, 1, 9223372036854775807)
        y = aten.slice.Tensor(y, 1, 0, 9223372036854775807, 2)
        y = prims.convert_element_type.default(y, torch.float64)
        return aten.expand.default(y[None], [2, 7, 3])

    assert rewritten(no_op, function, torch.randn(5, 8))[0] == 0


@given(st.permutations([0, 1]), st.booleans())
def test_pattern_names_the_same_value_everywhere(order, same):
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    inner = graph.call_function(operator.neg, (x,))
    args = [inner, x if same else y]
    node = graph.call_function(operator.mul, tuple(args[i] for i in order))
    pattern = Op(operator.mul, (Op(operator.neg, ("v",)), "v"), swap=True)
    found = match(pattern, node)
    assert found == ({"v": x} if same else None)


def test_first_alternative_that_matches_is_taken():
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(operator.neg, (x,))
    pattern = Either((Op(operator.pos, ("a",)), Op(operator.neg, ("b",)), "c"))
    assert match(pattern, node) == {"b": x}
    assert match(pattern, x) == {"c": x}


def double_adds(graph: Graph) -> int:
    """A user's pass that is plain to see: x + y becomes (x + y) * 2."""
    nodes = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    for node in nodes:
        with graph.inserting_after(node):
            doubled = graph.call_function(aten.mul.Tensor, (node, 2))
        node.replace_all_uses_with(doubled, delete_user_cb=lambda user, d=doubled: user is not d)
    return len(nodes)


def triple_adds(graph: Graph) -> int:
    return 3 * double_adds(graph)


def is_relu(node: Node) -> bool:
    return node.target is aten.relu.default


def passes_of(passes=None, **settings) -> tuple[GraphPass, ...]:
    return compile_config(Config(codegen={"passes": passes or {}}, **settings)).passes


def names(passes) -> list[str]:
    return [each.name for each in passes]


def test_passes_are_on_by_default_by_switch_and_by_size():
    assert names(passes_of()) == ["no_op", "functionalization"]
    small = GraphPass("other", double_adds, max_num_tokens=16)
    passes = passes_of(
        {"silu_and_mul": True, "no_op": False, "double_adds": double_adds, "small": small}
    )
    expected = ["functionalization", "silu_and_mul", "double_adds", "small"]
    assert names(passes) == expected
    assert names(passes_up_to(passes, None)) == expected
    assert names(passes_up_to(passes, 16)) == expected
    assert names(passes_up_to(passes, 17)) == expected[:-1]
    assert thresholds(passes) == (16,)


def test_a_users_pass_takes_the_place_of_a_shipped_one():
    first, second = passes_of({"no_op": double_adds})
    assert (first.name, first.apply, second.name) == ("no_op", double_adds, "functionalization")


def test_w19_user_passes_are_found_by_name_in_nested_modules_too():
    (*_, first, second) = passes_of({"a": "operator:neg", "b": "torch.nn.functional:silu"})
    assert (first.apply, second.apply) == (operator.neg, F.silu)


@pytest.mark.parametrize(
    "passes",
    [
        {"no_such_pass": True},
        {"no_such_pass": False},
        {"own": "no.such.module:thing"},
        {"own": "no_such_entry_point"},
        {"own": 3},
        {"dedupe": "operator:neg"},
    ],
)
def test_passes_that_are_not_there_are_refused_when_config_is_made(passes):
    with pytest.raises(InvalidSetting, match=r"codegen\.passes\["):
        Config(codegen={"passes": passes})


def test_passes_are_on_from_their_level():
    assert passes_of(level=0) == ()
    assert names(passes_of(level=1)) == ["no_op", "functionalization"]
    assert names(passes_of({"no_op": True}, level=0)) == ["no_op"]


def test_key_follows_the_source_of_passes():
    def key(passes=None):
        config = compile_config(Config(codegen={"passes": passes or {}}))
        return codegen_key(machine_key(config.code, CPU), "piece", config.passes, None).digest

    assert key({"a": double_adds}) == key({"a": double_adds})
    digests = {
        key(),
        key({"a": double_adds}),
        key({"a": triple_adds}),
        key({"a": double_adds, "b": triple_adds}),
        key({"b": triple_adds, "a": double_adds}),
        key({"no_op": False}),
        key({"silu_and_mul": True}),
    }
    assert len(digests) == 7


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.Parameter(torch.randn(8))
        self.gate_up = nn.Linear(8, 16, bias=False)

    def forward(self, x, r):
        normed, total = llama(x, r, self.norm)
        gate, up = self.gate_up(normed).chunk(2, -1)
        return F.silu(gate) * up, total


INPUTS = {"x": "float32[num_tokens, 8]", "r": "float32[num_tokens, 8]"}


@pytest.mark.compile
def test_inductor_runs_the_passes_that_are_on(compiled):
    model = Gated()
    made = compiled(
        model,
        inputs=INPUTS,
        compiler="inductor",
        codegen={"passes": {"add_rms_norm": True, "silu_and_mul": True}},
    )
    ran = [
        (event.facts["graph_pass"], event.facts["rewrites"]) for event in made.events.named("pass")
    ]
    assert [name for name, _ in ran] == [
        "no_op",
        "functionalization",
        "add_rms_norm",
        "silu_and_mul",
    ]
    assert dict(ran)["add_rms_norm"] == 1
    assert dict(ran)["silu_and_mul"] == 1
    for size in (1, 7, 64):
        x, r = torch.randn(size, 8), torch.randn(size, 8)
        torch.testing.assert_close(made(x, r), model(x, r))


@pytest.mark.compile
def test_user_pass_changes_what_is_compiled(compiled):
    class Add(nn.Module):
        def forward(self, x, r):
            return x + r

    made = compiled(
        Add(), inputs=INPUTS, compiler="inductor", codegen={"passes": {"double_adds": double_adds}}
    )
    x, r = torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(made(x, r), (x + r) * 2)
