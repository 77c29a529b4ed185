"""Splitting at ops: by name, pattern and predicate, and at every difficult place."""

import pytest
import torch
from torch import nn

from piecegraph.compile.bundle.key_factors import trace_key
from piecegraph.compile.ir.plan import CallStep, PieceStep
from piecegraph.config import Config, compile_config
from piecegraph.errors import InvalidSetting, UnknownSplittingOp

from .models import Body, X, assert_right

pytestmark = pytest.mark.compile

ops = torch.ops.piecegraph_test
ALL = ("piecegraph_test::*",)


@pytest.fixture
def cut(compiled):
    """Compile a body, compare with it at several sizes, and return its plan."""

    def cut_(body, **settings):
        model = Body(body)
        made = compiled(model, inputs=X, **({"splitting_ops": ALL} | settings))
        assert_right(made, model, (1, 3, 64))
        return made.plan

    return cut_


def kinds(plan):
    return "".join("p" if isinstance(step, PieceStep) else "c" for step in plan.steps)


def plain(m, x):
    y = m.linear(x)
    z = ops.fresh(y, "a")
    return ops.log.tagged(z, tag="bc") + y


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"splitting_ops": ("piecegraph_test::fresh",)}, "pcp"),
        ({"splitting_ops": ("piecegraph_test::fresh.default",)}, "pcp"),
        ({"splitting_ops": ("piecegraph_test::log",)}, "pcp"),
        ({"splitting_ops": ("piecegraph_test::log.tagged",)}, "pcp"),
        ({"splitting_ops": ("piecegraph_test::fresh", "piecegraph_test::log")}, "pccp"),
        ({"splitting_ops": ("piecegraph_test::fresh", "piecegraph_test::mix")}, "pcp"),
        ({"splitting_ops": ("piecegraph_test::fresh", "no::such")}, UnknownSplittingOp),
        ({"splitting_ops": ("piecegraph_test::mix",)}, UnknownSplittingOp),
        ({"splitting_ops": ("piecegraph_test::*",)}, "pccp"),
        ({"splitting_ops": ("*::fr?sh",)}, "pcp"),
        ({"splitting_ops": ("*.tagged",)}, "pcp"),
        ({"splitting_ops": (lambda node: node.target is ops.fresh,)}, "pcp"),
        ({"splitting_ops": ("piecegraph.tests_predicate:missing",)}, InvalidSetting),
        ({"splitting_ops": ("piecegraph_test::log.default",)}, UnknownSplittingOp),
        ({"splitting_ops": ("no::such",)}, UnknownSplittingOp),
        ({"splitting_ops": ("no::*",)}, UnknownSplittingOp),
        ({}, "p"),
    ],
)
def test_what_a_setting_cuts_at(cut, settings, expected):
    settings = {"splitting_ops": ()} | settings
    if isinstance(expected, str):
        assert kinds(cut(plain, **settings)) == expected
    else:
        with pytest.raises(expected):
            cut(plain, **settings)


def test_unknown_op_error_lists_the_custom_ops_there_are(cut):
    with pytest.raises(UnknownSplittingOp, match="piecegraph_test::fresh, piecegraph_test::log"):
        cut(plain, splitting_ops=("vllm::attention",))


def predicate(node):
    return node.target is ops.fresh


def other_predicate(node):
    return node.target is ops.log


def test_predicate_is_keyed_by_its_source():
    def key(found):
        config = compile_config(Config(splitting_ops=() if found is None else (found,)))
        return trace_key(Body(plain), config, torch.device("cpu")).digest

    assert key(predicate) == key(predicate)
    assert len({key(predicate), key(other_predicate), key(None)}) == 3


def test_configuration_with_functions_is_shown_by_their_names():
    passes = {"functionalization": True, "own": other_predicate, "named": "operator:neg"}
    config = Config(splitting_ops=(predicate, "a::b"), codegen={"passes": passes})
    shown = config.model_dump(mode="json")
    assert shown["splitting_ops"] == ["predicate", "a::b"]
    assert shown["codegen"]["passes"] == {
        "functionalization": True,
        "own": "other_predicate",
        "named": "operator:neg",
    }


AWKWARD = {
    # body, kinds of steps
    "starts with a splitting op": (lambda m, x: m.linear(ops.fresh(x, "a")), "cp"),
    "ends with a splitting op": (lambda m, x: ops.fresh(m.linear(x), "a"), "pc"),
    "is nothing but a splitting op": (lambda m, x: ops.fresh(x, "a"), "c"),
    "consecutive": (lambda m, x: ops.fresh(ops.fresh(x + 1, "a"), "b") + 1, "pccp"),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_graph_that(cut, name):
    body, expected = AWKWARD[name]
    assert kinds(cut(body)) == expected


def test_getitem_belongs_to_the_op_it_takes_from(cut):
    def body(m, x):
        first, second = ops.pair(x + 1, [x.shape[0], 8])
        return first * second

    assert kinds(cut(body)) == "pcp"


def test_indexing_a_single_result_is_not_unpacking(cut):
    def body(m, x):
        y = ops.fresh(x + 1, "a")
        return y[0] + ops.fresh(y, "b")[-1]

    assert kinds(cut(body)) == "pcpcp"


def test_one_of_several_results_taken_after_a_cut(cut):
    def body(m, x):
        ranked = x.topk(2)
        return ops.fresh(ranked.values, "a") + ranked.indices

    assert kinds(cut(body)) == "pcp"


def test_consecutive_ops_with_getitems_between(cut):
    def body(m, x):
        first, _ = ops.pair(x + 1, [x.shape[0], 8])
        second, third = ops.pair(first, [x.shape[0], 8], scale=3.0)
        return second - third

    plan = cut(body)
    assert kinds(plan) == "pccp"
    assert [step.outs for step in plan.calls()] == [("t1", None), ("t2", "t3")]


def test_sizes_reach_ops_in_lists_keywords_and_expressions(cut):
    def body(m, x):
        tokens = x.size(0)
        first, _ = ops.pair(x, sizes=[tokens * 2, 4])
        second, _ = ops.pair(first, [*x.shape])
        third, _ = ops.pair(second, [*x[: tokens // 2 + 1].shape[1:], tokens])
        return third + x.shape[0]

    plan = cut(body)
    assert all(isinstance(step, CallStep) for step in plan.calls())
    assert all("s0" in str(step.args) + str(step.kwargs) for step in plan.calls()[:3])


def test_size_made_in_one_piece_is_made_again_in_the_next(cut):
    def body(m, x):
        doubled = x.shape[0] * 2
        y = torch.cat([x, x]).view(doubled, 8)
        y = ops.fresh(y, "a")
        return y.view(doubled // 2, 16)

    plan = cut(body)
    assert kinds(plan) == "pcp"
    steps = [step for step in plan.steps if isinstance(step, PieceStep)]
    assert steps[1].args[1:] == ("s0",)


def test_tensor_that_is_only_asked_for_its_size_is_no_result(cut):
    """Otherwise compiled code has to write it to memory."""

    def body(m, x):
        y = m.linear(x)
        flat = (y * 2).view(-1, 4)
        z = ops.fresh(flat.sin(), "a")
        return z.view(y.shape) + flat.shape[0]

    plan = cut(body)
    assert kinds(plan) == "pcp"
    assert len(plan.steps[0].outs) == 1


def test_size_that_comes_out_as_a_number(cut):
    def body(m, x):
        once = x.shape[0] // x.shape[0]
        y = ops.fresh(x + 1, "a")
        return y[:once] + once

    assert kinds(cut(body)) == "pcp"


def test_allocation_joins_the_piece_before_so_that_none_is_for_it_alone(cut):
    def body(m, x):
        y = m.linear(x)
        out = torch.empty_like(y)
        ops.mix(y, out, "a")
        again = torch.empty_like(y)
        ops.mix(out, again, "b")
        third = y.new_empty(y.shape)
        ops.mix(again, third, "c")
        return third * 2

    assert kinds(cut(body)) == "pcccp"


def test_allocation_is_made_where_it_is_used_first(cut):
    def body(m, x):
        y = ops.fresh(x + 1, "a")
        early = torch.empty_like(x)
        y = ops.fresh(y, "b")
        early.copy_(y)
        late = torch.empty_like(early)
        ops.mix(early, late, "c")
        return late * 2

    plan = cut(body)
    assert kinds(plan) == "pccpcp"
    assert [len(step.outs) for step in plan.steps if isinstance(step, PieceStep)] == [1, 2, 1]


def test_allocation_that_needs_a_result_stays_after_it(cut):
    def body(m, x):
        y = ops.fresh(x * 2, "a")
        out = torch.empty_like(y)
        ops.mix(y, out, "b")
        return out + 1

    assert kinds(cut(body)) == "pcpcp"


def test_mutations_keep_their_order(cut):
    def body(m, x):
        y = x * 2
        state = torch.zeros(())
        ops.bump(state, y)
        seen = state * 1
        y.add_(1)
        ops.bump(state, y)
        y.mul_(3)
        return torch.cat([y, seen.expand(1, 8), state.expand(1, 8)])

    assert kinds(cut(body)) == "pcpcp"


def test_value_written_in_place_after_it_crossed_a_cut(cut):
    def body(m, x):
        y = x + 1
        view = y[:, :4]
        z = ops.fresh(y, "a")
        view.mul_(2)
        return y + z

    assert kinds(cut(body)) == "pcp"


def test_last_piece_that_only_has_effects(compiled):
    class Remember(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x):
            y = ops.fresh(x + 1, "a")
            self.seen.add_(y.sum(0))
            return y

    model, plain = Remember(), Remember()
    made = compiled(model, inputs=X, splitting_ops=ALL)
    assert_right(made, plain, (3, 1))
    torch.testing.assert_close(model.seen, plain.seen)
    assert kinds(made.plan) == "pcp"


def test_layer_names_do_not_tell_pieces_apart(cut):
    def body(m, x):
        for name in ("one", "two", "three", "four"):
            x = ops.fresh(m.linear(x), name).relu()
        return x

    plan = cut(body)
    assert kinds(plan) == "pcpcpcpcp"
    assert len(plan.pieces) == 3


def test_splitting_op_inside_a_nested_region(cut):
    @torch.compiler.nested_compile_region
    def region(x, weight):
        return ops.fresh(x @ weight, "layer") + 1

    def body(m, x):
        return region(region(x, m.linear.weight), m.linear.weight)

    assert kinds(cut(body)) == "pcpcp"
