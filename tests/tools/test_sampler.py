"""Draws follow the softmax, and depend on a request's seed and place alone."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.tools.engine.sampler import WARMED, Sampler, _filtered
from piecegraph.tools.engine.scheduler import SamplingParams
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.requests import read_requests

from .conftest import started

CPU, DRAWS = torch.device("cpu"), 10_000
SCORES = [math.sin(7 * token) * 3 for token in range(40)] + [2.5, 2.5]


def chances(scores, params):
    """The probability of each token by the definitions, in plain Python."""
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    order = order[: params.top_k or len(order)]
    weights = {t: math.exp((scores[t] - scores[order[0]]) / params.temperature) for t in order}
    kept, reached = {}, 0.0
    for token in order:
        if reached < params.top_p:
            kept[token] = weights[token]
        reached += weights[token] / sum(weights.values())
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(scores))]


def excess(counts, expected):
    """Chi-square of the counts over what one in 1000 right samplers exceeds (Wilson-Hilferty).

    Tokens that are expected fewer than five times count as one.
    """
    common = [(n, DRAWS * p) for n, p in zip(counts, expected, strict=True) if DRAWS * p >= 5]
    rare = DRAWS - sum(n for n, _ in common), DRAWS - sum(e for _, e in common)
    groups = [*common, rare] if rare[1] >= 1 else common
    square = sum((n - e) ** 2 / e for n, e in groups)
    free = len(groups) - 1
    return square / (free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3)


@pytest.mark.parametrize("vary", ["seed", "place"])
@pytest.mark.parametrize("params", [*WARMED[1:], SamplingParams(0.9, top_k=12)])
def test_10000_draws_have_the_distribution_of_the_plain_softmax(params, vary):
    at = [(number, 3) if vary == "seed" else (3, number) for number in range(DRAWS)]
    settings = (params.temperature, params.top_k, params.top_p)
    draws = [(SamplingParams(*settings, seed=seed), place) for seed, place in at]
    drawn = Sampler(CPU).sample(torch.tensor([SCORES]).expand(DRAWS, -1), draws)
    counts = drawn.bincount(minlength=len(SCORES)).tolist()
    expected = chances(SCORES, params)
    assert all(p > 0 for n, p in zip(counts, expected, strict=True) if n)
    assert excess(counts, expected) < 1
    hotter = SamplingParams(params.temperature * 1.5, *settings[1:])
    assert excess(counts, chances(SCORES, hotter)) > 1  # the test notices it


SETTINGS = st.builds(
    SamplingParams,
    st.sampled_from([0.0, 1e-40, 0.3, 1.0, 1.7]),
    st.integers(0, 9),
    st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    st.integers(0, 2**63),
)


@given(st.lists(st.tuples(SETTINGS, st.integers(0, 10**6)), min_size=1, max_size=6), st.randoms())
def test_a_row_is_drawn_as_it_would_be_alone(draws, random):
    rows = torch.tensor([random.choices([0.0, 0.5, 1.0, 2.0], k=12) for _ in draws])
    sampler = Sampler(CPU)
    together = sampler.sample(rows, draws).tolist()
    for row, draw, token in zip(rows, draws, together, strict=True):
        assert sampler.sample(row[None], [draw]).tolist() == [token]
        params = draw[0]
        if params.temperature:
            assert chances(row.tolist(), params)[token] > 0
        else:
            assert token == row.argmax()


def test_a_row_that_draws_from_all_tokens_keeps_even_the_rarest():
    """Its batch may be filtered because of other rows."""
    scores = torch.tensor([[0.0, -30.0, -40.0]])
    assert torch.equal(_filtered(scores, torch.tensor([[3.0]]), torch.tensor([[1.0]])), scores)


def test_tokens_beyond_top_p_are_left_out_where_the_first_ones_reach_it_exactly():
    four = torch.zeros(1, 4)
    kept = _filtered(four, torch.tensor([[4.0]]), torch.tensor([[0.5]]))
    assert kept.isfinite().tolist() == [[True, True, False, False]]


def test_warm_up_samples_each_setting_for_a_changed_batch_and_the_same(monkeypatch):
    calls = []
    changed = []

    class Watched(Sampler):
        def sample(self, logits, draws):
            calls.append((len(logits), draws))
            return super().sample(logits, draws)

        def _columns_of(self, batch, vocab):
            changed.append(len(calls))
            return super()._columns_of(batch, vocab)

    sampler = Watched(CPU)
    task = sampler.warmup(lambda rows: torch.zeros(rows, 50), [4, 2, 4])
    assert task.shapes == [0, 1, 2, 4]
    for shape in task.shapes:
        task.run(shape)
    assert [rows for rows, _ in calls] == [rows for rows in task.shapes for _ in range(12)]
    assert [draws[0][0] for rows, draws in calls if rows == 4][::2] == list(WARMED)
    assert changed == list(range(1, len(calls), 2))
    sampler.sample(torch.zeros(4, 50), [(WARMED[-1], 0)] * 4)
    assert changed[-1] == len(calls)  # it knows no batch of the warm-up


def served(**options):
    """The tokens of each request of the trace, with mixed settings."""
    mixed = {"temperature": "0,0.7,1.5", "top_k": "0,20", "top_p": "0.9,1"}
    with started(**{"requests": 8, "max_num_reqs": 4, **mixed, **options}) as engine:
        return engine.serve()


@cache
def served_one_by_one():
    return served(mode="none", max_num_reqs=1)


@pytest.mark.compile
@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "none"},
        {"mode": "piecewise", "strategy": "lazy"},
        {"mode": "full-decode-only", "strategy": "delayed"},
        {"mode": "full-and-piecewise"},
        {"max_num_reqs": 8, "max_num_tokens": 64},
        {"kv_blocks": 76, "block_size": 2},  # it preempts
        {"speculate": 2, "max_num_tokens": 24},
        {"overlap": True},
        {"buckets": "linear", "capture_sizes": None, "max_num_tokens": 32},
    ],
    ids=str,
)
def test_tokens_depend_on_seeds_alone(options):
    assert served(**options) == served_one_by_one()


def test_each_request_of_a_trace_has_settings_in_turn_and_a_seed_of_its_own():
    options = {"temperature": "0,0.7", "top_k": "5", "top_p": "1,0.9,0.5", "requests": 4}
    one, other = (
        [request.sampling for request in read_requests(read_run_options(seed=seed, **options))]
        for seed in (1, 2)
    )
    settings = [(each.temperature, each.top_k, each.top_p) for each in one]
    assert settings == [(0, 5, 1), (0.7, 5, 0.9), (0, 5, 0.5), (0.7, 5, 1)]
    assert len({each.seed for each in [*one, *other]}) == 8
