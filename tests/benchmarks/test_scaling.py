"""Pieces scheduled on paper, and what the benchmark says of them."""

import pytest

from piecegraph.benchmarks import scaling


@pytest.mark.parametrize(
    ("seconds", "workers", "expected"),
    [
        ([3.0, 1.0, 2.0], 1, 6.0),
        ([3.0, 1.0, 2.0], 2, 3.0),  # the longest first
        ([1.0, 1.0, 1.0, 3.0], 2, 3.0),
        ([5.0, 1.0], 8, 5.0),  # no piece is divided
        ([], 4, 0.0),
    ],
)
def test_whoever_is_free_takes_the_longest_piece(seconds, workers, expected):
    assert scaling.makespan(seconds, workers) == expected


def test_simulated_rows_have_no_time_until_ready(monkeypatch):
    def start(layers, workers):
        return {"pieces": [2.0, 2.0], "by_workers": workers, "compile": 4 - workers, "ready": 9.0}

    monkeypatch.setattr(scaling, "_start", start)
    result = scaling.run(quick=True)
    kinds = [(row["kind"], row["workers"], row["compile_s"]) for row in result["rows"]]
    assert kinds[:3] == [("measured", 0, 4), ("measured", 1, 3), ("simulated", 2, 2.0)]
    assert [row["ready_s"] for row in result["rows"]] == [9.0, 9.0, None, None, None]
    assert result["ratios"]["one_worker_over_alone"] == 0.75
    assert result["ratios"]["simulated_8_workers_over_alone"] == 0.5
