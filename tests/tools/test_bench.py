"""Benchmarks are found by name and report ratios and rows."""

from __future__ import annotations

import pytest

from piecegraph.tools.bench import find
from piecegraph.tools.cli.bench_commands import COMPARISONS


@pytest.mark.parametrize("name", COMPARISONS)
def test_each_comparison_of_the_command_line_exists(name):
    assert callable(find(name).run)


@pytest.mark.compile
def test_a_step_is_compared_with_a_bare_loop_and_with_a_wrapper_per_piece():
    result = find("step").run(True)
    assert set(result["ratios"]) == {
        "piecewise_over_floor",
        "wrapper_over_piecewise",
        "none_over_stitched",
    }
    assert 0 < result["full_us"] < 100
    lower_bound = result["full_us"]
    for figure in ("served_us", "served_padded_us", "served_buffers_us"):
        assert lower_bound < result[figure] < 1000
    steps = [row["step"] for row in result["rows"]]
    assert steps == [
        "PIECEWISE", "wrapper per piece", "NONE", "FULL", "FULL, the engine's buffer",
        "FULL, served", "FULL, served, padded", "FULL, served, the engine's buffers",
    ]  # fmt: skip
    assert all(row["us"] > 0 and row["other_us"] > 0 for row in result["rows"])
