"""The dispatch benchmark: what it reports and that its bounds hold."""

from __future__ import annotations

from piecegraph.tools.bench.dispatch import run


def test_the_benchmark_compares_both_dispatchers():
    result = run(quick=True)
    assert len(result["rows"]) == 3
    for row in result["rows"]:
        assert 0 < row["dispatch_ns"] < row["dict_ns"]
    # the target is below 200 ns; twice that leaves room for a busy machine
    assert result["dispatch_ns"] < 400
    assert result["ratios"]["dict_over_dispatch"] > 2
