"""The benchmark of the strategies measures real captures of the replay backend."""

from functools import partial

import pytest

from piecegraph.benchmarks import strategies


@pytest.mark.compile
@pytest.mark.usefixtures("traced_once")
def test_real_captures_under_each_strategy_are_measured(monkeypatch):
    few = partial(strategies.read_run_options, capture_sizes="1,2,4,8,16")
    monkeypatch.setattr(strategies, "read_run_options", few)
    result = strategies.run(quick=True)
    eager, delayed, lazy = result["rows"]
    assert [row["strategy"] for row in result["rows"]] == ["EAGER", "DELAYED", "LAZY"]
    assert result["ratios"].keys() == strategies.RATIOS.keys()
    assert eager["captured"] >= delayed["captured"] > 0
    assert eager["captured"] > lazy["captured"] >= lazy["used"]
    for row in result["rows"]:
        assert 0 < row["ready_ms"] < row["first_median_ms"]
        assert row["capture_ms"] > 0
        assert row["MiB"] > 0
