"""Benchmarks are found by name and report ratios and rows."""

from __future__ import annotations

import pytest

from piecegraph.tools.bench import find
from piecegraph.tools.cli.app import main
from piecegraph.tools.cli.bench_commands import COMPARISONS


@pytest.mark.parametrize("name", COMPARISONS)
def test_each_comparison_of_the_command_line_exists(name):
    assert callable(find(name).run)


def test_only_the_wanted_ways_to_start_are_measured_with_what_fills_their_caches(monkeypatch):
    prepare = find("prepare")
    started = []

    def start(way, layers, *_):
        started.append((way, layers))
        return dict.fromkeys(prepare.MEASURED) | {"ready": 1.0 + layers}

    monkeypatch.setattr(prepare, "_start", start)
    monkeypatch.setattr(prepare, "_warm_up_toolchain", lambda ways: None)
    result = prepare.run(True, ["warm_ahead"])
    assert started == [("ahead", 32), ("warm_ahead", 32)]
    assert result["ratios"] == {}
    result = prepare.run(True, ["cold", "warm_ahead"])
    assert result["ratios"] == {"warm_ahead_over_cold": 1.0, "ahead_over_cold": 1.0}
    result = prepare.run(True, ["cold", "compile_cold"])
    assert result["ratios"].keys() == {"cold_over_torch_compile", "slope_over_torch_compile"}


def test_an_unknown_way_to_start_names_those_there_are(capsys):
    assert main(["bench", "prepare", "--ways", "colt"]) == 2
    assert "one of served, cold, warm" in capsys.readouterr().err


@pytest.mark.compile
def test_a_step_is_compared_with_a_bare_loop_and_with_a_wrapper_per_piece(monkeypatch):
    step = find("step")
    monkeypatch.setattr(step, "LAYERS", 4)
    result = step.run(True)
    assert set(result["ratios"]) == {
        "piecewise_over_floor",
        "wrapper_over_piecewise",
        "none_over_stitched",
    }
    for figure in ("full_us", "served_us", "served_padded_us", "served_buffers_us"):
        assert result[figure] > 0
    steps = [row["step"] for row in result["rows"]]
    assert steps == [
        "PIECEWISE", "wrapper per piece", "NONE", "FULL", "FULL, the engine's buffer",
        "FULL, served", "FULL, served, padded", "FULL, served, the engine's buffers",
        "least step, by hand", "FULL, served, the engine's buffers, padded",
    ]  # fmt: skip
    assert all(row["us"] > 0 and row["other_us"] > 0 for row in result["rows"])
