"""Passes: how they are chosen, keyed and run."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node
from torch.nn import functional as F

from piecegraph.compile.bundle.key_factors import codegen_key, machine_key
from piecegraph.compile.ir.config import GraphPass
from piecegraph.compile.passes.graph_pass import passes_up_to, thresholds
from piecegraph.config import Config, compile_config
from piecegraph.errors import InvalidSetting

aten = torch.ops.aten
CPU = torch.device("cpu")


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
    assert names(passes_of()) == ["functionalization"]
    small = GraphPass("other", double_adds, max_num_tokens=16)
    passes = passes_of({"functionalization": False, "double_adds": double_adds, "small": small})
    expected = ["double_adds", "small"]
    assert names(passes) == expected
    assert names(passes_up_to(passes, None)) == expected
    assert names(passes_up_to(passes, 16)) == expected
    assert names(passes_up_to(passes, 17)) == expected[:-1]
    assert thresholds(passes) == (16,)


def test_a_users_pass_takes_the_place_of_a_shipped_one():
    (only,) = passes_of({"functionalization": double_adds})
    assert (only.name, only.apply) == ("functionalization", double_adds)


def test_w19_user_passes_are_found_by_name_in_nested_modules_too():
    (*_, first, second) = passes_of({"a": "operator:neg", "b": "torch.nn.functional:silu"})
    assert (first.apply, second.apply) == (operator.neg, F.silu)


@pytest.mark.parametrize(
    "passes",
    [
        {"no_such_pass": True},
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
    assert names(passes_of(level=1)) == ["functionalization"]
    assert names(passes_of({"functionalization": True}, level=0)) == ["functionalization"]


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
        key({"functionalization": False}),
    }
    assert len(digests) == 6


INPUTS = {"x": "float32[num_tokens, 8]", "r": "float32[num_tokens, 8]"}


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
    ran = [(each.facts["graph_pass"], each.facts["rewrites"]) for each in made.events.named("pass")]
    assert ran == [("functionalization", 0), ("double_adds", 1)]
