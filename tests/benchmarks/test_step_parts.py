"""The benchmark of parts: a row per part and mode."""

from piecegraph import GraphMode
from piecegraph.benchmarks import step_parts

PARTS = ("checks", "log")
"""Of eight: the benchmark prepares two models for each."""


def test_each_part_has_a_row(monkeypatch):
    monkeypatch.setattr(step_parts, "STEPS", {GraphMode.FULL_DECODE_ONLY: 20})
    monkeypatch.setattr(step_parts, "PARTS", PARTS)
    rows = step_parts.run(quick=True)["rows"]
    assert [(row["mode"], row["part"]) for row in rows] == [
        ("FULL_DECODE_ONLY", part) for part in PARTS
    ]
    assert all(row["step_us"] > 0 and row["low_us"] <= row["high_us"] for row in rows)
