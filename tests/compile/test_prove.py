"""Proofs of guards, against trying every size by substitution."""

import itertools
import math

import pytest
import sympy
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Max, Min, Mod, ToFloat

from piecegraph.compile.guards.prover import EXHAUSTIVE, prove, python_text

T = sympy.Symbol("num_tokens", integer=True)
P = sympy.Symbol("num_patches", integer=True)

POSITIVE = st.integers(1, 9)
LEAVES = st.one_of(st.sampled_from([T, P]), st.integers(-3, 12).map(sympy.Integer))
SIZES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(lambda a, b: FloorDiv(a, sympy.Integer(b)), inner, POSITIVE),
        st.builds(lambda a, b: Mod(a * a, sympy.Integer(b)), inner, POSITIVE),
        st.builds(Max, inner, inner),
        st.builds(Min, inner, inner),
        st.builds(lambda a, b: CeilToInt(IntTrueDiv(a, sympy.Integer(b))), inner, POSITIVE),
    ),
    max_leaves=5,
)
CONDITIONS = st.builds(
    lambda relation, a, b: relation(a, b),
    st.sampled_from([sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge]),
    SIZES,
    SIZES,
)
GUARDS = st.one_of(
    CONDITIONS,
    st.builds(sympy.And, CONDITIONS, CONDITIONS),
    st.builds(sympy.Or, CONDITIONS, CONDITIONS),
    st.builds(sympy.Not, CONDITIONS),
)
RANGES = st.tuples(st.integers(1, 4), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1]))


def failures(guard, ranges):
    """Every combination of sizes for which the guard is false."""
    spans = [range(low, high + 1) for low, high in ranges.values()]
    points = [dict(zip(ranges, point, strict=True)) for point in itertools.product(*spans)]
    wrong = [p for p in points if guard.subs({s: sympy.Integer(n) for s, n in p.items()}) != True]  # noqa: E712
    return [{str(s): n for s, n in p.items() if s in guard.free_symbols} for p in wrong]


@given(GUARDS, RANGES, RANGES)
def test_proof_says_what_trying_every_size_says(guard, tokens, patches):
    ranges = {T: tokens, P: patches}
    wrong = failures(guard, ranges)
    proof = prove(guard, ranges)
    assert proof.holds is (not wrong)
    for counterexample in proof.failing:
        assert counterexample in wrong
    assert bool(proof.failing) is (bool(wrong) and proof.method == "trial")


@given(SIZES, RANGES, RANGES)
def test_python_text_computes_the_expression(expression, tokens, patches):
    point = {"num_tokens": tokens[1], "num_patches": patches[1]}
    value = eval(python_text(sympy.sympify(expression)), {"math": math, **point})
    exact = sympy.sympify(expression).subs({T: tokens[1], P: patches[1]})
    assume(exact.is_Integer)  # torch's Min and Max leave a few constants unevaluated
    assert value == int(exact)


LIMIT = {T: (1, 1 << 17)}


@pytest.mark.parametrize(
    ("guard", "holds", "count"),
    [
        (sympy.Ne(Mod(T, 128), 0), False, 1024),
        (sympy.Eq(Mod(T * 128, 128), 0), True, 0),
        (T < 32767, False, (1 << 17) - 32766),
        (2 * T < 1 << 19, True, 0),
        (sympy.Ne(T, 1), False, 1),
        (T >= 1, True, 0),
        (sympy.Le(FloorDiv(T, 2), T), True, 0),
        (sympy.Eq(Max(T, 4), T), False, 3),
        (sympy.Ge(Min(T, 4), 1), True, 0),
        (sympy.true, True, 0),
        (sympy.Eq(Mod(T, FloorDiv(T + 1, 2)), 0), False, 65535),
    ],
)
def test_guards_of_the_kinds_torch_makes(guard, holds, count):
    proof = prove(guard, LIMIT)
    assert proof.holds is holds
    assert proof.failures == count


def test_two_wide_ranges_are_proved_by_intervals_or_not_at_all():
    wide = {T: (1, EXHAUSTIVE), P: (1, EXHAUSTIVE)}
    assert prove(sympy.Gt(T + P, 1), wide).holds is True
    assert prove(sympy.Ne(T, P), wide).holds is False
    assert prove(sympy.Ne(T * T, 2 * P * P + 3), wide).holds is None


def test_guard_that_raises_at_a_size_fails_there():
    proof = prove(sympy.Ne(Mod(sympy.Integer(7), T - 3), 9), {T: (2, 6)})
    assert proof.failing == ({"num_tokens": 3},)


def test_a_guard_is_evaluated_with_what_torch_prints():
    guard = sympy.Le(ToFloat(T) * 1.5, 12.0)
    assert "torch." in python_text(guard)
    assert prove(guard, {T: (1, 8)}).holds
    assert prove(guard, {T: (1, 10)}).failing == ({"num_tokens": 9}, {"num_tokens": 10})


def test_symbol_without_a_range_is_not_proved():
    proof = prove(sympy.Gt(sympy.Symbol("u7", integer=True), 0), LIMIT)
    assert proof.holds is None
    assert "u7" in proof.method
