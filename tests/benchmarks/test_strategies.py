"""The benchmark of the strategies measures real captures of the replay backend."""

import pytest

from piecegraph.benchmarks import strategies


@pytest.mark.compile
def test_real_captures_under_each_strategy_are_measured():
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
