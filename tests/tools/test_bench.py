"""Benchmarks are found by name and report ratios and rows."""

from __future__ import annotations

import pytest

from piecegraph.tools.bench import find, names


def test_benchmarks_are_found_by_their_file():
    assert "step" in names()
    assert not any(name.startswith("_") for name in names())


@pytest.mark.compile
def test_a_step_is_compared_with_a_bare_loop():
    result = find("step").run(True)
    assert set(result["ratios"]) == {"piecewise_step_over_bare_loop", "full_step_over_bare_loop"}
    assert [row["mode"] for row in result["rows"]] == ["PIECEWISE", "FULL"]
    assert all(row["step_us"] > row["bare_loop_us"] > 0 for row in result["rows"])
