"""Whole graphs that Inductor partitions: its options, its results, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from piecegraph.compile.backends.partition import (
    partition_options,
    partitioning,
    partitions_of,
    partitions_through,
)
from piecegraph.compile.backends.registry import Compiler
from piecegraph.compile.ir.compilation import CODE
from piecegraph.compile.pieces.fingerprint import fingerprint
from piecegraph.config import Config, compile_config
from piecegraph.errors import InvalidSetting, NotPartitioned, UnknownSplittingOp
from piecegraph.tools.bisect.pieces import debug_pieces
from piecegraph.torch_compat.compiling.partition import Partitions

from . import ops as _registers  # noqa: F401
from .test_models import MIX, SIZES, Stack, X

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

CPU = torch.device("cpu")
ops = torch.ops.piecegraph_test
WHOLE: dict[str, Any] = {
    "inputs": X,
    "splitting_ops": MIX,
    "compiler": "inductor",
    "max_num_tokens": 128,
    "codegen.inductor_partition": True,
}


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


def test_equal_to_eager_and_loaded_the_next_time(compiled):
    model = Stack(2)
    made, again = (compiled(model, **WHOLE) for _ in range(2))
    assert made.plan.piece_uses() == [0]
    assert made.plan.partition_ops == ("piecegraph_test::mix",)
    assert made.plan.partitions() == again.plan.partitions() == 3
    (end,) = made.events.named("compile.end")
    assert end.facts["partitions"] == 3
    assert again.compiled.from_bundle
    assert [partitions_of(piece) for piece in again.compiled.pieces] == [3]
    for size in SIZES:
        x = torch.randn(size, 8)
        for one in (made, again):
            torch.testing.assert_close(one(x), model(x).detach())


def test_each_range_is_cut(compiled):
    model = Body(lambda x: ops.fresh(x.sin(), "a").cos())
    settings = {**WHOLE, "splitting_ops": ("piecegraph_test::fresh",)}
    made = compiled(model, codegen={"ranges": (16,), "sizes": (4,)}, **settings)
    assert [span.partitions for span in made.plan.ranges] == [2] * len(made.plan.ranges)
    for size in (1, 4, 16, 17):
        x = torch.randn(size, 8)
        torch.testing.assert_close(made(x), model(x))


@pytest.mark.heavy
@pytest.mark.parametrize("way", ["no cache", "dump directory"])
def test_code_that_is_not_kept_is_cut_too(compiled, tmp_path, way):
    settings = {"cache": False} if way == "no cache" else {"codegen": {"dump_dir": tmp_path}}
    made = compiled(Stack(1), **WHOLE, **settings)
    assert made.plan.partitions() == 2
    called: list[Any] = []

    def hook(partition):
        called.append(partition)
        return partition

    x = torch.randn(5, 8)
    with partitions_through(hook):
        torch.testing.assert_close(made(x), Stack(1)(x).detach())
    assert len(called) == 2


def test_partition_can_be_run_again_on_the_same_list(compiled):
    """A replay does that; the code itself empties the list."""
    made = compiled(Stack(1), **WHOLE)

    def twice(partition):
        def call(args):
            partition(args)
            return partition(args)

        return call

    x = torch.randn(5, 8)
    with partitions_through(lambda partition: partition):
        once = made(x)
    with partitions_through(twice):
        assert made(x).shape == once.shape


@pytest.mark.parametrize(
    "settings", [{"compiler": "eager"}, {"codegen": {"inductor_options": {"cpp_wrapper": True}}}]
)
def test_what_cannot_cut_is_refused(settings):
    with pytest.raises(InvalidSetting, match="cannot partition a graph"):
        compile_config(Config().changed(**{**WHOLE, **settings}))


def test_op_that_is_not_in_the_graph_is_refused(compiled):
    with pytest.raises(UnknownSplittingOp, match="there::is_none"):
        compiled(Stack(1), **{**WHOLE, "splitting_ops": ("there::is_none",)})


def test_predicate_must_pick_all_calls_of_an_op(compiled):
    settings = {**WHOLE, "cache": False}

    def first(node):
        return "layers.0" in node.args

    def mixes(node):
        return "mix" in str(node.target)

    with pytest.raises(InvalidSetting, match="1 of 2 calls of piecegraph_test::mix"):
        compiled(Stack(2), **settings | {"splitting_ops": (first,)})
    made = compiled(Stack(1), **settings | {"splitting_ops": (mixes,)})
    assert made.plan.partition_ops == ("piecegraph_test::mix",)


@pytest.mark.parametrize("name", ["sin", "silu"])
def test_op_that_inductor_generates_code_for_is_refused(compiled, name):
    """One it lowers itself, one it has taken to pieces before."""
    op = getattr(torch.ops.aten, name)
    model = Body(lambda x: op(x * 2) + 1)
    with pytest.raises(NotPartitioned, match=f"no call of aten::{name}"):
        compiled(model, **{**WHOLE, "splitting_ops": (f"aten::{name}",), "cache": False})


def unused_result(x):
    ops.fresh(x, "unused")
    return x * 2


def unused_mutation(x):
    ops.mix(x, torch.zeros_like(x), "unused")
    return x * 2


@pytest.mark.parametrize(
    "body", [pytest.param(unused_result, marks=pytest.mark.heavy), unused_mutation]
)
def test_op_that_nobody_needs_is_left_out(compiled, body):
    names = ("piecegraph_test::fresh", "piecegraph_test::mix")
    model = Body(lambda x: ops.fresh(body(x), "used").sin() + ops.fresh(x, "used"))
    used = names if body is unused_mutation else names[:1]
    made = compiled(model, **{**WHOLE, "splitting_ops": used, "cache": False})
    alone = Body(body)
    dead = names[1:] if body is unused_mutation else names[:1]
    whole = compiled(alone, **{**WHOLE, "splitting_ops": dead, "cache": False})
    assert whole.plan.partitions() == 1
    x = torch.randn(5, 8)
    torch.testing.assert_close(made(x), model(x))
    torch.testing.assert_close(whole(x), alone(x))


def two_parts(x):
    first = x.softmax(1)
    return torch.cat([first, ops.fresh(first, "a").softmax(1)], 1)


def three_parts_before_an_op(x):
    first = x.softmax(1)
    second = ops.fresh(first, "a").softmax(1)
    third = ops.fresh(second, "b").softmax(1)
    return ops.fresh(torch.cat([first, second, third], 1), "c") * 2


def parts_used_afterwards(x):
    first = x.softmax(1)
    second = ops.fresh(first, "a") @ torch.ones(8, 8)
    whole = torch.cat([first, second], 1)
    mixed = ops.fresh(second, "b") + first
    return ops.fresh(whole, "c"), mixed, first, whole


def parts_that_are_read_late(x):
    """The order of execution that needs least memory has an op between `cat` and its parts."""
    half = x.sin() + x
    whole = torch.cat([x, half], 1)
    mutated, other = whole * 0.25, half + 0.5
    ops.bump(mutated, whole)
    ops.bump(other, half)
    return mutated.sum(1), other, whole * 1.0


@pytest.mark.parametrize(
    ("body", "reorder"),
    [
        (parts_that_are_read_late, True),
        *(
            pytest.param(body, reorder, marks=pytest.mark.heavy)
            for body, reorder in (
                (three_parts_before_an_op, True),
                (two_parts, True),
                (two_parts, False),
                (parts_used_afterwards, True),
                (parts_used_afterwards, False),
                (three_parts_before_an_op, False),
                (parts_that_are_read_late, False),
            )
        ),
    ],
)
def test_partitions_write_parts_of_one_tensor(compiled, body, reorder):
    """Each of them allocated the whole tensor, so that all but the last part was garbage."""
    model = Body(body)
    op = "bump" if body is parts_that_are_read_late else "fresh"
    options = {"reorder_for_peak_memory": reorder}
    settings = {
        "splitting_ops": (f"piecegraph_test::{op}",),
        "codegen": {"inductor_options": options},
    }
    made = compiled(model, **{**WHOLE, **settings, "cache": False})
    for size in SIZES:
        x = torch.randn(size, 8)
        torch.testing.assert_close(made(x), model(x))


def test_anything_else_outside_of_partitions_is_refused(monkeypatch):
    """It would be lost on a replay: the kernels of a CPU are seen by no dispatch mode."""
    made = Partitions(2, {"a::b"}, {"buf3": "Conditional ops"})
    _replace_torch(monkeypatch, made)
    compiler = partitioning(Compiler("inductor", lambda *given: (list, {})))
    with pytest.raises(NotPartitioned, match=r"buf3 is in no partition \(Conditional ops\)"):
        compiler.compile(
            torch.fx.GraphModule({}, torch.fx.Graph()), [], partition_options(["a::b"])
        )


def test_partitions_of_each_artifact_are_counted(monkeypatch):
    loaded: list[Any] = []
    _replace_torch(monkeypatch, Partitions(7))
    compiler = Compiler("inductor", lambda *given: (list, {}), lambda one: [loaded.append(one)])
    pieces = partitioning(compiler).load([{CODE: b"0"}, {CODE: b"1"}])
    assert [partitions_of(piece) for piece in pieces] == [7, 7]
    assert loaded == [[{CODE: b"0"}], [{CODE: b"1"}]]


def _replace_torch(monkeypatch, made):
    from contextlib import nullcontext

    from piecegraph.compile.backends import partition as partitions

    monkeypatch.setattr(partitions, "inductor_partitions", lambda wrap: nullcontext(made))


def whole(model, **settings):
    (piece,) = debug_pieces(model, compile_config(Config().changed(**{**WHOLE, **settings})), CPU)
    return piece


def test_content_hash_holds_names_of_layers_and_where_it_is_cut():
    model = Stack(2)
    renamed = Stack(2)
    renamed.layers[1].name = "another"
    base = whole(model)
    assert whole(Stack(2)).digest == base.digest
    assert whole(renamed).digest != base.digest
    assert whole(model, splitting_ops=()).digest != base.digest


def test_content_hash_leaves_out_the_body_of_an_op_that_is_called(monkeypatch):
    from piecegraph.compile.pieces import fingerprint as module

    graph = whole(Stack(1)).graph
    digests = [fingerprint(graph.graph, graph, cut) for cut in ((), MIX)]
    monkeypatch.setattr(module, "op_source", lambda op: "another body")
    again = [fingerprint(graph.graph, graph, cut) for cut in ((), MIX)]
    assert [one == other for one, other in zip(digests, again, strict=True)] == [False, True]
