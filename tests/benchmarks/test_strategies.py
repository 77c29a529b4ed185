"""The strategies' benchmark: early readiness without more work, and its chart."""

from __future__ import annotations

from pathlib import Path

from piecegraph.tools.bench import strategies


def test_early_strategies_are_ready_in_a_tenth_at_equal_work(tmp_path: Path) -> None:
    result = strategies.run(quick=True)
    assert result["modeled"] is True
    assert "modeled, not measured" in result["note"]
    assert result["ratios"]["lazy_ready_over_eager"] <= 0.1
    assert result["ratios"]["delayed_ready_over_eager"] <= 0.1
    assert abs(result["ratios"]["delayed_total_over_eager"] - 1) <= 0.1
    eager, delayed, lazy = result["rows"]
    assert eager["captured"] == delayed["captured"] > lazy["captured"] >= lazy["used"] > 0
    assert lazy["MiB"] < eager["MiB"] == delayed["MiB"]
    assert delayed["first_worst_ms"] < eager["first_worst_ms"]
    assert eager["inter_worst_ms"] < delayed["inter_worst_ms"]
    strategies.plot(result, tmp_path / "strategies.png")
    assert (tmp_path / "strategies.png").read_bytes().startswith(b"\x89PNG")
