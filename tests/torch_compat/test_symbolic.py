"""Symbolic sizes, and what a shape environment holds about them."""

import gc
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx import Graph, GraphModule, Proxy
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from piecegraph.torch_compat.basics import symbolic
from piecegraph.torch_compat.basics.symbolic import forget_assumptions
from piecegraph.torch_compat.basics.tensors import fresh_fake_mode


def test_conditions_that_hold_for_all_sizes_are_decided_without_a_guard():
    env = fresh_fake_mode().shape_env
    rows = env.create_unbacked_symint()
    torch._check(rows >= 0)
    assert symbolic.statically_true(rows * 2 <= rows * 3)
    assert not symbolic.statically_true(rows <= 4)
    assert symbolic.statically_true(True)
    assert not env.guards


def sizes(number=2):
    """A shape environment with `number` backed sizes, 5 and up."""
    env = ShapeEnv()
    made = []
    for value in range(5, 5 + number):
        source = ConstantSource(f"size{value}")
        symbol = env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        made.append(env.create_symintnode(symbol, hint=value, source=source))
    return env, made


def test_expression_follows_equalities_and_the_first_symbol_does_not():
    _, (one, other) = sizes()
    before = symbolic.original_symbol(other)
    assert symbolic.expression_of(other) == before
    assert symbolic.expression_of(2 * one + 1) == 2 * symbolic.expression_of(one) + 1
    assert symbolic.expression_of(one < other).free_symbols == {
        symbolic.expression_of(one),
        before,
    }


def test_numbers_that_are_computed_from_integers_alone():
    _, (size, _) = sizes()
    assert symbolic.is_of_integers(size * 2 // 3)
    assert not symbolic.is_of_integers(size / 2)
    assert not symbolic.is_of_integers(torch.sym_int(size * 0.5))
    assert not symbolic.is_of_integers(size > 3)


def test_sizes_that_are_stated_equal_become_one_symbol():
    env, (one, other) = sizes()
    other = env.create_symintnode(symbolic.original_symbol(other), hint=5)
    symbolic.state_equal(one, other)
    assert symbolic.expression_of(one) == symbolic.expression_of(other)
    assert symbolic.original_symbol(one) != symbolic.original_symbol(other)


def test_the_traced_number_of_a_size():
    _, (one, other) = sizes()
    assert symbolic.traced_size(one) == 5
    assert symbolic.traced_size(one + other) == 11
    assert symbolic.traced_size(3) == 3


def test_a_size_in_which_some_symbols_are_numbers():
    _, (one, other) = sizes()
    numbers = {symbolic.expression_of(one): 1}
    assert symbolic.with_numbers(3, numbers) == 3
    fixed = symbolic.with_numbers(2 * one + 1, numbers)
    assert (type(fixed), fixed) == (int, 3)
    mixed = symbolic.with_numbers(2 * one + other, numbers)
    assert symbolic.expression_of(mixed) == symbolic.expression_of(other) + 2


def test_arithmetic_is_written_into_a_graph():
    s = sympy.Symbol("s", integer=True, positive=True)
    graph = Graph()
    result = symbolic.fx_nodes_of(3 * s + 1, {s: Proxy(graph.placeholder("a"))})
    graph.output(result.node)
    assert GraphModule({}, graph)(4) == 13


def test_expression_is_written_as_python():
    s = sympy.Symbol("num_tokens", integer=True, positive=True)
    assert eval(symbolic.python_text(2 * s + 1), {"num_tokens": 3}) == 7


def test_intervals_prove_what_holds_everywhere():
    s = sympy.Symbol("s", integer=True)
    assert symbolic.holds_by_intervals(s < 10, {s: (1, 9)})
    assert not symbolic.holds_by_intervals(s < 10, {s: (1, 10)})


def test_guards_are_listed_from_a_position():
    env, (one, _) = sizes()
    assert one != 7
    first = symbolic.shape_guards(env)
    assert symbolic.number_of_guards(env) == len(first)
    assert len(first) == 1
    assert one != 8
    assert symbolic.shape_guards(env)[:1] == first
    assert symbolic.shape_guards(env, 1) == symbolic.shape_guards(env)[1:]


def test_bounds_of_an_unbacked_size():
    env = fresh_fake_mode().shape_env
    size = env.create_unbacked_symint()
    torch._check(size >= 2)
    torch._check(size <= 9)
    symbol = symbolic.expression_of(size)
    found = [expression for expression, _ in symbolic.narrowed_range(env, symbol)]
    assert found == [symbol >= 2, symbol <= 9]
    assert list(symbolic.narrowed_range(env, sympy.Symbol("other"))) == []


def test_conditions_torch_would_check_at_run_time():
    env = fresh_fake_mode().shape_env
    size = env.create_unbacked_symint()
    torch._check(size >= 0)
    torch._check(size % 3 == 0)
    conditions = symbolic.deferred_asserts(env)
    assert conditions
    assert all(each.free_symbols == {symbolic.expression_of(size)} for each in conditions)


def test_symbols_that_became_numbers_have_their_line():
    class Loop(torch.nn.Module):
        def forward(self, x):
            for _ in range(x.shape[0]):  # here
                x = x + 1
            return x

    from piecegraph.torch_compat.tracing import dynamo

    x = torch.zeros(5, 2)
    dynamo.mark_dynamic(x, 0, "num_tokens", (1, 64), "backed_size_oblivious")
    with dynamo.dynamo_tracing("backed_size_oblivious"):
        captured = dynamo.capture_full_graph(Loop(), (x,), {})
    ((value, where),) = symbolic.replaced_symbols(captured.fake_mode.shape_env).values()
    assert int(value) == 5
    line = int(where.partition(":")[2].split()[0])
    assert "# here" in Path(__file__).read_text().splitlines()[line - 1]


@pytest.mark.parametrize("text", [None, "x = y  # model.py:8 in forward"])
def test_line_is_read_from_torchs_text(text):
    class Sloc:
        maybe_user_loc = text

    assert symbolic.user_line(Sloc()) == (text and "model.py:8 in forward")


def test_a_size_without_a_bound_has_the_largest_range():
    env, (rows, _) = sizes()
    assert symbolic.size_range(env, rows.node.expr)[1] == symbolic.UNBOUNDED
    assert symbolic.traced_value(env, rows.node.expr) == symbolic.traced_size(rows)
    torch._check(rows <= 64)
    assert symbolic.size_range(env, rows.node.expr)[1] <= 64


def test_shape_environments_are_released():
    env, made = sizes()
    assert not symbolic.statically_true(made[0] <= made[1] * 7 - 40)
    symbolic.release_shape_environments()
    released = weakref.ref(env)
    del env, made
    gc.collect()
    assert released() is None


@pytest.mark.parametrize("raises", [False, True])
def test_a_run_on_symbolic_inputs_leaves_no_objects(raises):
    def run():
        with (
            suppress(ValueError),
            symbolic.symbolic_inputs([(torch.ones(5, 4), ("rows", None))]) as ((x,), _, _env),
        ):
            bool((x.reshape(-1) * 2).shape[0] > 9)
            if raises:
                raise ValueError

    def objects():
        gc.collect()
        return len(gc.get_objects())

    run()
    before = objects()
    for _ in range(10):
        run()
    assert objects() < before + 10


def test_what_a_trace_learned_of_a_size_is_forgotten():
    env = ShapeEnv()
    size = env.create_unspecified_symint_and_symbol(8, ConstantSource("n"), DimDynamic.DYNAMIC)
    symbol = size.node.expr
    assert bool(size > 5)
    assert env.guards
    forget_assumptions(env, symbol, 1, 64)
    assert not env.guards
    assert not env.axioms
    assert env.var_to_range[symbol].lower <= 1
    assert env.var_to_range[symbol].upper >= 64


def test_a_run_on_symbolic_inputs_has_its_choices_with_their_lines():
    inputs = [(torch.ones(5, 4), ("rows", None)), (torch.ones(5), ("rows",))]
    with symbolic.symbolic_inputs(inputs) as ((x, y), labels, env):
        assert x.shape[1] == 4
        bool(x.shape[0] == 1)
        (symbol,) = labels
        assert y.shape[0].node.expr == symbol
        found = [(str(guard), line) for guard, line in symbolic.guards_of_run(env)]
    assert any(str(symbol) in text and (line or "").startswith(__file__) for text, line in found)


def test_all_sizes_are_known_by_what_reads_them():
    env, made = sizes()
    found = dict(symbolic.sizes_by_source(env))
    assert [int(size.node.hint) for size in found.values()] == [5, 6]
    assert [size.node.expr for size in found.values()] == [size.node.expr for size in made]
