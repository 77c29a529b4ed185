"""Passes: what each rewrites, unchanged results, and how passes are chosen and keyed."""

import operator
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx import Graph
from torch.nn import functional as F

from piecegraph.compile.bundle.key_factors import codegen_key, machine_key
from piecegraph.compile.conditions.code import code_parts
from piecegraph.compile.ir.config import GraphPass
from piecegraph.compile.passes import unfused_add
from piecegraph.compile.passes.graph_pass import passes_up_to, thresholds
from piecegraph.config import Config, compile_config
from piecegraph.errors import InvalidSetting
from piecegraph.runtime.prepare import prepare
from piecegraph.tools.explain import explain

aten = torch.ops.aten
prims = torch.ops.prims
CPU = torch.device("cpu")


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


SUMS = [
    ("cuda", (4, 8), aten.add.Tensor, 1),
    ("cuda", (8,), aten.add.Tensor, 0),  # a bias
    ("cuda", (1, 8), aten.add.Tensor, 0),
    ("cuda", (4, 8), aten.addmm.default, 0),  # as the model says
    ("cpu", (4, 8), aten.add.Tensor, 0),
]


@pytest.mark.parametrize(("device", "shape", "original", "rewrites"), SUMS)
def test_a_residual_stream_is_not_added_by_the_product_on_a_gpu(device, shape, original, rewrites):
    graph, meta = Graph(), {"device": torch.device(device)}
    nodes = [graph.placeholder(name) for name in ("inp", "a", "b")]
    nodes.append(graph.call_function(aten.addmm.default, tuple(nodes)))
    graph.output((nodes[-1],))
    for node, size in zip(nodes, (shape, (4, 6), (6, 8), (4, 8)), strict=True):
        node.meta["val"] = SimpleNamespace(shape=size, **meta)
    nodes[-1].meta["original_aten"] = original
    assert unfused_add.apply(graph) == rewrites
    graph.lint()
    module = torch.fx.GraphModule({}, graph)
    assert targets(module) == (
        [aten.mm.default, aten.add.Tensor] if rewrites else [aten.addmm.default]
    )
    inputs = torch.randn(shape), torch.randn(4, 6), torch.randn(6, 8)
    torch.testing.assert_close(module(*inputs)[0], torch.addmm(*inputs))


@pytest.fixture
def engine_pass(tmp_path, monkeypatch):
    """An installed engine whose entry point `count_adds` is a pass."""
    (tmp_path / "engine_passes.py").write_text(
        "import torch\n"
        "def count_adds(graph):\n"
        "    adds = graph.find_nodes(op='call_function', target=torch.ops.aten.add.Tensor)\n"
        "    return len(adds)\n"
    )
    installed = tmp_path / "engine-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: engine\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        "[piecegraph.passes]\ncount_adds = engine_passes:count_adds\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def double_adds(graph):
    """A user's pass that is plain to see: x + y becomes (x + y) * 2."""
    nodes = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    for node in nodes:
        with graph.inserting_after(node):
            doubled = graph.call_function(aten.mul.Tensor, (node, 2))
        node.replace_all_uses_with(doubled, delete_user_cb=lambda user, d=doubled: user is not d)
    return len(nodes)


def triple_adds(graph):
    return 3 * double_adds(graph)


def passes_of(passes=None, **settings):
    return compile_config(Config(codegen={"passes": passes or {}}, **settings)).passes


def names(passes):
    return [each.name for each in passes]


def test_passes_are_on_by_default_by_switch_and_by_size(engine_pass):
    assert names(passes_of()) == ["functionalization", "unfused_add"]
    small = GraphPass("other", double_adds, max_num_tokens=16)
    passes = passes_of(
        {"count_adds": True, "unfused_add": False, "double_adds": double_adds, "small": small}
    )
    expected = ["functionalization", "count_adds", "double_adds", "small"]
    assert names(passes) == expected
    assert names(passes_up_to(passes, None)) == expected
    assert names(passes_up_to(passes, 16)) == expected
    assert names(passes_up_to(passes, 17)) == expected[:-1]
    assert thresholds(passes) == (16,)


def test_a_users_pass_takes_the_place_of_a_shipped_one():
    first, second = passes_of({"functionalization": double_adds})
    assert (first.apply, second.name) == (double_adds, "unfused_add")


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
    assert names(passes_of(level=1)) == ["functionalization", "unfused_add"]
    assert names(passes_of({"unfused_add": True}, level=0)) == ["unfused_add"]


class Stating:
    """A pass as Inductor has them, which states what it does."""

    stated = "3"

    def __call__(self, graph):
        pass

    def uuid(self):
        return self.stated


def test_key_follows_the_source_of_passes(engine_pass):
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
        key({"unfused_add": False}),
        key({"count_adds": True}),
        *(key({"a": GraphPass("", double_adds, uuid=stated)}) for stated in "12"),
        key({"a": Stating()}),
    }
    assert len(digests) == 10
    Stating.stated = "4"
    assert key({"a": Stating()}) not in digests


INPUTS = {"x": "float32[num_tokens, 8]", "r": "float32[num_tokens, 8]"}


class Opaque(nn.Module):
    """An engine's op in Python, twice in one piece."""

    def forward(self, x):
        return torch.ops.engine_ir.double(torch.ops.engine_ir.double(x) @ x.T)


def lower(graph):
    nodes = graph.find_nodes(op="call_function", target=torch.ops.engine_ir.double.default)
    for node in nodes:
        node.target, node.args = aten.mul.Tensor, (*node.args, 2)
    return len(nodes)


@pytest.mark.compile
def test_an_op_in_python_that_no_pass_lowers_is_named_however_the_code_was_made(tmp_path, caplog):
    with torch.library._scoped_library("engine_ir", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("engine_ir::double", torch.empty_like, lib=library)
        for settings, calls in (
            ({"cache_dir": tmp_path}, 2),
            ({"cache_dir": tmp_path}, 2),  # a warm start
            ({"cache": False}, 2),
            ({"cache_dir": tmp_path, "codegen": {"passes": {"lower": lower}}}, None),
        ):
            caplog.clear()
            config = Config(inputs={"x": INPUTS["x"]}, max_num_tokens=8, graph_mode="NONE",
                            **settings)  # fmt: skip
            prepared = prepare(Opaque(), config)
            ops = {row["op"]: row["calls"] for row in prepared.report()["opaque_ops"]}
            assert ops == ({"engine_ir::double.default": calls} if calls else {})
            assert ("engine_ir::double.default" in caplog.text) is bool(calls)
            advice = explain(prepared, "md")
            assert ("call engine_ir::double.default 2 times a step" in advice) is bool(calls)
            prepared.close()


class Add(nn.Module):
    def forward(self, x, r):
        return x + r


traced_adds = GraphPass(
    "",
    lambda graph: len(graph.find_nodes(op="call_function", target=operator.add)),
    before_grad=True,
)


@pytest.mark.compile
def test_inductor_runs_the_passes_that_are_on_and_compiles_what_they_leave(compiled, engine_pass):
    passes = {"count_adds": True, "traced": traced_adds, "double_adds": double_adds}
    made = compiled(Add(), inputs=INPUTS, compiler="inductor", codegen={"passes": passes})
    ran = [
        (event.facts["graph_pass"], event.facts["rewrites"]) for event in made.events.named("pass")
    ]
    shipped = [(name, 0) for name in ("functionalization", "unfused_add")]
    assert ran == [("traced", 1), *shipped, ("count_adds", 1), ("double_adds", 1)]
    for size in (1, 7, 64):
        x, r = torch.randn(size, 8), torch.randn(size, 8)
        torch.testing.assert_close(made(x, r), (x + r) * 2)


class Useless(nn.Module):
    def forward(self, x, r):
        return x.view(x.shape)[:, :].to(torch.float32) + r


@pytest.mark.compile
def test_operators_without_effect_are_gone_before_passes_run(compiled):
    seen = []
    passes = {"see": lambda graph: seen.extend(n.target for n in graph.nodes)}
    made = compiled(Useless(), inputs=INPUTS, compiler="inductor", codegen={"passes": passes})
    assert [each for each in seen if not isinstance(each, str)] == [aten.add.Tensor]
    x, r = torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(made(x, r), x + r)


class Lazy(types.ModuleType):
    """As those of `torch.ops` and of transformers: an attribute is made when it is first read."""

    def __getattr__(self, name):
        if name != "width":
            raise ImportError(f"{name} needs a package that is not installed")
        self.width = 4
        return self.width


aten, lazy = torch.ops.aten, Lazy("lazy")


def reads_lazy_modules(x):
    return x.device.type, x.width, aten.addmm.default, lazy.width


def test_what_a_process_has_read_of_a_lazy_module_is_in_no_key():
    for module, name in ((aten, "device"), (aten, "addmm"), (lazy, "width")):
        vars(module).pop(name, None)
    before = code_parts(reads_lazy_modules)
    assert reads_lazy_modules(types.SimpleNamespace(device=torch.device("cpu"), width=1))
    _ = aten.device
    assert code_parts(reads_lazy_modules) == before
    assert before[".lazy.width"] == "4"
