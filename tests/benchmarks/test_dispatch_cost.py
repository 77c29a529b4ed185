"""The dispatch benchmark: what it reports and that its bounds hold."""

from piecegraph.benchmarks.dispatch import run


def test_the_benchmark_compares_both_dispatchers():
    result = run(quick=True)
    assert [row["batch"] for row in result["rows"]] == [
        "decode, padded",
        "decode, exact",
        "mixed, padded",
    ]
    for row in result["rows"]:
        assert row["dispatch_ns"] > 0
        assert row["dict_over_dispatch"] > 0
    assert result["ratios"]["dict_over_dispatch"] > 2
