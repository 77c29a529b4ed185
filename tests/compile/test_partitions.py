"""Whole graphs whose code Inductor partitions: what it gives, and what is refused."""

import pytest
import torch

from piecegraph.config import Config, compile_config
from piecegraph.errors import InvalidSetting, NotPartitioned
from piecegraph.runtime.setup.switches import resolve_config
from piecegraph.tools.bisect.pieces import debug_pieces
from piecegraph.torch_compat.compiling.partition import partitions_through

from .models import SIZES, Function, Products, Stack, X, assert_right

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

ops = torch.ops.piecegraph_test
WHOLE = {
    "inputs": X,
    "splitting_ops": ("piecegraph_test::*",),
    "compiler": "inductor",
    "max_num_tokens": 128,
    "codegen.partition": "inductor",
}


def partitions(step, *args):
    """How many partitions a call runs."""
    calls = []

    def hook(partition):
        return lambda args: calls.append(partition) or partition(args)

    with partitions_through(hook):
        step(*args)
    return len(calls)


def test_each_range_and_size_is_partitioned_and_loaded_the_next_time(compiled):
    model, ranges = Products(2), {"codegen.ranges": (16,), "codegen.sizes": (4,)}
    made, again = (compiled(model, **WHOLE, **ranges) for _ in range(2))
    assert made.plan.piece_uses() == [0]
    assert made.plan.cut_at == ("piecegraph_test::fresh",)
    assert again.compiled.from_bundle
    for size in (*SIZES, 4):
        x = torch.randn(size, 8)
        for one in (made, again):
            torch.testing.assert_close(one(x), model(x))
            assert partitions(one, x) == 3


@pytest.mark.parametrize("way", ["no cache", "dump directory"])
def test_code_that_is_not_stored_is_partitioned_too(compiled, tmp_path, way):
    kept = {"cache": False} if way == "no cache" else {"codegen.dump_dir": tmp_path}
    assert partitions(compiled(Products(), **WHOLE, **kept), torch.randn(5, 8)) == 2


def test_an_op_that_elementwise_work_follows_is_beside_the_next(compiled):
    """Inductor defers what the second op reads to that op."""

    def body(x):
        first = ops.fresh(x.cos(), "a")
        return ops.fresh(x[:, :4].sin(), "b"), ops.fresh(first.cos(), "c")

    made, x = compiled(Function(body), **WHOLE), torch.randn(5, 8)
    torch.testing.assert_close(made(x), body(x))
    assert partitions(made, x) == 2


def parts_of_one_tensor(x):
    first = x.softmax(1)
    return torch.cat([first, ops.fresh(first, "a").softmax(1)], 1)


def parts_before_an_op(x):
    first = x.softmax(1)
    second = ops.fresh(first, "a").softmax(1)
    third = ops.fresh(second, "b").softmax(1)
    return ops.fresh(torch.cat([first, second, third], 1), "c") * 2


@pytest.mark.parametrize(
    "body", [pytest.param(parts_of_one_tensor, marks=pytest.mark.heavy), parts_before_an_op]
)
def test_parts_of_a_tensor_that_partitions_compute_are_not_lost(compiled, body):
    made = compiled(Function(body), **WHOLE)
    assert_right(made, body)


def out_of_use(x):
    ops.fresh(x, "unused")
    return ops.fresh(x, "used") * 2


def under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return ops.fresh(x @ x.T, "a").float()


def lowered(x):
    return torch.ops.aten.sin(x * 2) + 1


def first_of_two(node):
    return "a" in node.args


@pytest.mark.parametrize(
    ("body", "rules", "reason"),
    [
        (out_of_use, WHOLE["splitting_ops"], r"calls piecegraph_test::fresh\(unused\) as number 1,"
         r" and the code piecegraph_test::fresh\(used\)"),
        (under_autocast, WHOLE["splitting_ops"], "fresh is called under autocast"),
        (lowered, ("aten::sin",), r"calls aten::sin\(\) as number 1, and the code no more"),
        (parts_before_an_op, (first_of_two,), "some calls of piecegraph_test::fresh only"),
    ],
)  # fmt: skip
def test_what_cannot_be_partitioned_is_refused(compiled, body, rules, reason):
    with pytest.raises(NotPartitioned, match=reason):
        compiled(Function(body), **{**WHOLE, "splitting_ops": rules}, cache=False)


def test_another_order_of_calls_is_refused(compiled, monkeypatch):
    """An op may have state that no schema names."""
    from torch._inductor.scheduler import Scheduler

    original = Scheduler.compute_last_usage

    def reordered(scheduler):
        scheduler.nodes.reverse()
        original(scheduler)

    def two_calls(x):
        return ops.fresh(x, "a"), ops.fresh(x, "b")

    monkeypatch.setattr(Scheduler, "compute_last_usage", reordered)
    with pytest.raises(NotPartitioned, match=r"calls .*fresh\(a\) as number 1, and .*fresh\(b\)"):
        compiled(Function(two_calls), **WHOLE, cache=False)


@pytest.mark.parametrize(
    "settings", [{"compiler": "eager"}, {"codegen.inductor_options": {"cpp_wrapper": True}}]
)
def test_only_inductors_python_code_is_partitioned(settings):
    with pytest.raises(InvalidSetting, match="cannot partition code"):
        Config().changed(**{**WHOLE, **settings})
    off = resolve_config(Config().changed(**{**WHOLE, "level": 0, "compiler": "inductor"}))
    assert off.codegen.partition == "inductor"  # the compiler is set
    assert resolve_config(Config(level=0, codegen={"partition": "inductor"})).compiler == "eager"


def test_an_op_that_is_called_is_in_the_digest_by_its_interface(monkeypatch):
    from piecegraph.compile.conditions import kinds

    def digest(**settings):
        config = compile_config(Config().changed(**{**WHOLE, **settings}))
        ((piece, *_),) = debug_pieces(Stack(1), config, torch.device("cpu"))
        return piece.digest

    settings = ({}, {"splitting_ops": ()})
    before = [digest(**each) for each in settings]
    monkeypatch.setitem(kinds.KINDS, "op", kinds.Kind(lambda *_: {"body": "another"}))
    after = [digest(**each) for each in settings]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]
