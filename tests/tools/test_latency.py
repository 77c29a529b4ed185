"""Percentiles and token latencies."""

import pytest

from piecegraph.tools.serve.report import summarize, token_latencies


def test_percentiles_interpolate():
    assert summarize([1.0, 2.0, 3.0, 4.0]) == {
        "count": 4,
        "mean": 2.5,
        "median": 2.5,
        "p90": pytest.approx(3.7),
        "p99": pytest.approx(3.97),
    }


def test_nothing_measured_is_none():
    assert summarize([]) == {
        "count": 0,
        "mean": None,
        **dict.fromkeys(("median", "p90", "p99")),
    }


def test_first_tokens_count_from_the_arrival_and_others_from_the_one_before():
    latencies = token_latencies({0: 1.0, 1: 5.0}, {0: [2.0, 2.5, 4.0], 1: [6.0]})
    assert latencies["time_to_first_token"]["median"] == 1.0
    assert latencies["inter_token"]["median"] == 1.0
