"""Fitted sizes against brute force; validation and suggestions."""

import itertools
import random
from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph import Config
from piecegraph.config import resolve_graph_mode
from piecegraph.errors import InvalidSetting
from piecegraph.tools.sizes import fit
from piecegraph.tools.sizes.fit import fit_sizes
from piecegraph.tools.sizes.suggested import suggested_sizes
from piecegraph.tools.sizes.traffic import (
    _by_padding,
    blur,
    expect,
    fit_validated,
    padding_waste,
    suggest_sizes,
    thinned,
)


def total_cost(counts, sizes):
    spent = 0.0
    for tokens, count in enumerate(counts):
        if tokens and count:
            fitting = [size for size in sizes if size >= tokens]
            spent += count * min(fitting, default=float("inf"))
    return spent


histograms = st.lists(st.integers(0, 9), min_size=2, max_size=10)


@given(histograms, st.integers(2, 6), st.data())
def test_the_fit_is_the_best_of_all_lists(counts, max_graphs, data):
    every = range(1, len(counts))
    base = data.draw(st.sets(st.sampled_from(every), max_size=1))
    sizes = fit_sizes(counts, max_graphs=max_graphs, base=base)
    assert base <= set(sizes)
    assert len(sizes) <= max_graphs
    assert list(sizes) == sorted(set(sizes))
    lists = (each for k in range(max_graphs + 1) for each in combinations(every, k))
    best = min(total_cost(counts, each) for each in lists if base <= set(each))
    assert total_cost(counts, sizes) == best


@given(histograms, st.integers(1, 5))
def test_aligned_sizes(counts, alignment):
    sizes = fit_sizes(counts, max_graphs=3, alignment=alignment)
    assert all(size % alignment == 0 for size in sizes)
    multiples = range(alignment, len(counts) + alignment, alignment)
    lists = (each for k in range(4) for each in combinations(multiples, k))
    assert total_cost(counts, sizes) == min(total_cost(counts, each) for each in lists)


@pytest.mark.parametrize("limits", [{"max_graphs": 0}, {"max_graphs": 1, "base": [1]}])
def test_a_limit_that_cannot_be_is_an_error(limits):
    with pytest.raises(InvalidSetting, match="max_graphs"):
        fit_sizes([0, 1, 1, 1], **limits)


def test_no_traffic_needs_the_base_alone():
    assert fit_sizes([0, 0, 0], max_graphs=4) == ()
    assert fit_sizes([0, 0, 0], max_graphs=4, base=[2]) == (2,)


@pytest.mark.slow
def test_the_work_of_a_large_fit_is_linear_in_the_batch_sizes(monkeypatch):
    rng = random.Random(0)
    counts = [rng.randrange(1000) for _ in range(8193)]
    evaluated, value_at = itertools.count(), fit._at

    def counted(*line):
        next(evaluated)
        return value_at(*line)

    monkeypatch.setattr(fit, "_at", counted)
    sizes = fit_sizes(counts, max_graphs=64)
    assert next(evaluated) <= 6 * 64 * 8193
    assert len(sizes) == 64
    even = [8192 * k // 64 for k in range(1, 65)]
    assert padding_waste(counts, sizes).share <= padding_waste(counts, even).share


def test_waste_counts_padding_and_what_has_no_graph():
    waste = padding_waste([5, 2, 0, 1, 3], [2, 3])
    assert (waste.real, waste.padded, waste.without_graph) == (2 + 3, 4 + 3, 3)
    assert waste.share == pytest.approx(2 / 7)
    assert padding_waste([0, 1], []).share == 0


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=60), st.floats(0, 0.9))
def test_blurring_moves_weight_and_keeps_it(counts, drift):
    spread = blur(counts, drift)
    assert len(spread) == len(counts)
    assert sum(spread) == pytest.approx(sum(counts[1:]), abs=1e-3)
    for tokens, weight in enumerate(spread):
        near = [n for n, c in enumerate(counts) if c and n and abs(n - tokens) <= drift * n + 1]
        assert weight == 0 or near


def test_blurring_spreads_evenly_over_half_to_one_and_a_half():
    counts = [0] * 40
    counts[10] = 11
    assert blur(counts, 0.5) == [0] * 5 + [1] * 11 + [0] * 24


def test_blurring_leaves_nothing_where_nothing_was_near():
    counts = [0] * 400
    counts[7], counts[11], counts[97], counts[140] = 3, 1, 13, 1
    spread = blur(counts, 0.3)
    assert spread[15:67] == [0] * 52
    assert spread[183:] == [0] * 217


def test_every_fit_keeps_the_widest_decode_batch_and_the_largest_size():
    default = (1, 2, 4, *range(8, 257, 8), 512)
    counts = [0] * 513
    counts[20] = 100
    for most in (3, 8, 24):
        fitted = fit_validated(counts, counts, default=default, max_graphs=most, widest=64)
        assert {64, 512} <= set(fitted)
    assert len(fit_validated(counts, counts, default=default, max_graphs=1)) == 1


def test_other_loads_are_expected():
    counts = [0] * 129
    counts[20] = 100
    expected = expect(counts, default=(32, 64, 128), widest=40)
    assert all(expected[6:41])
    assert sum(expected[12:29]) > sum(expected[60:])  # the widest decode batch is not passed
    assert all(weight > 0 for weight in expected[1:])
    assert expect(counts, default=(128,), widest=128, drift=0.0) == counts


def test_a_load_counts_by_its_share_of_padding_and_not_by_its_rows():
    """Of two kinds of traffic that pad the same share, the one with few rows counts the same."""
    few, many = [0] * 513, [0] * 513
    few[10], many[400] = 100, 100
    default = (20, 40, 512)
    weights = [sum(_by_padding(counts, default)) for counts in (few, many)]
    rows = [weight * n for weight, n in zip(weights, (10, 400), strict=True)]
    assert rows[0] / rows[1] == pytest.approx((10 / 10) / (400 / 112))


def test_a_fit_replaces_the_default_where_it_is_better():
    counts = [0] * 65
    counts[20] = counts[40] = 100
    default = (1, 8, 32, 64)
    sizes = fit_validated(counts, counts, default=default, max_graphs=8)
    assert len(sizes) <= 8
    assert padding_waste(counts, sizes).share < padding_waste(counts, default).share


def test_the_default_is_kept_where_the_fit_does_not_beat_it():
    counts, held_out = [0] * 65, [0] * 65
    counts[60], held_out[5] = 100, 100
    assert fit_validated(counts, held_out, default=(8, 64), max_graphs=2, drift=0.1) == (8, 64)


def test_better_sizes_are_suggested_and_not_again():
    counts = [0] * 65
    counts[21] = 1000
    default = (8, 16, 32, 64)
    found = suggest_sizes(default, counts)
    assert len(found) <= len(default)
    assert min(size for size in found if size >= 21) < 32
    assert padding_waste(counts, found).share < padding_waste(counts, default).share
    assert suggest_sizes(found, counts) is None


def test_sizes_that_gain_little_are_not_suggested():
    counts = [0] * 65
    counts[63] = 1000
    assert suggest_sizes((8, 63), counts) is None
    assert suggest_sizes((8, 64), counts, gain=0.02) is None
    assert suggest_sizes((8, 64), [0] * 65) is None


def test_a_kept_default_has_no_more_sizes_than_asked_for():
    default = [1, 2, 4, *range(8, 257, 8)]
    held_out = [1] * 257
    chosen = fit_validated([0, 100], held_out, default=default, max_graphs=8)
    assert chosen == thinned(default, 8)
    assert len(chosen) <= 8
    assert chosen[-1] == 256


def test_on_a_tie_fewer_graphs_are_chosen():
    counts = [0] * 8 + [5]
    chosen = fit_validated(counts, counts, default=[4, 8], max_graphs=8, drift=0.0)
    assert chosen == (8,)


def test_suggested_sizes_follow_batches_above_every_size():
    counts = [0] * 129
    counts[4], counts[100], counts[120] = 10, 30, 20
    found = suggest_sizes((1, 2, 4, 8, 16, 32), counts, widest=16)
    assert found[-1] == 120
    assert padding_waste(counts, found).without_graph == 0
    assert len(found) <= 6
    aligned = suggest_sizes((8, 16, 32), counts, alignment=8)
    assert all(size % 8 == 0 for size in aligned)


SERVING = {
    "max_num_tokens": 8192,
    "splitting_ops": ("a::b",),
    "attention": {"support": "UNIFORM_SINGLE_TOKEN_DECODE"},
}


def test_suggested_sizes_may_go_as_far_as_default_sizes_may():
    def largest(**settings):
        config = Config(**{**SERVING, "max_num_reqs": 16, **settings})
        limits = []

        def no_steps(limit):
            limits.append(limit)
            return [0] * (limit + 1)

        resolved, usage = resolve_graph_mode(config), SimpleNamespace(counts=no_steps)
        stated = suggested_sizes(SimpleNamespace(config=config, resolved=resolved, usage=usage))
        assert stated["suggested"] is None
        return limits[0]

    assert largest() == 512
    assert largest(max_num_tokens=100, sizes={"alignment": 8}) == 96
    assert largest(max_num_reqs=1024) == 1024  # decode
    assert largest(capture_sizes=(8, 40)) == 40
    assert largest(graph_mode="FULL_DECODE_ONLY") == 32  # no graph would serve larger steps
