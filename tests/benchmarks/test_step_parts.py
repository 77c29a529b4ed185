"""The benchmark of parts: a row per part and mode."""

from piecegraph import GraphMode
from piecegraph.benchmarks import step_parts
from piecegraph.runtime.setup.switches import PARTS


def test_each_part_has_a_row(monkeypatch):
    monkeypatch.setattr(step_parts, "STEPS", {GraphMode.FULL_DECODE_ONLY: 20})
    rows = step_parts.run(quick=True)["rows"]
    assert [(row["mode"], row["part"]) for row in rows] == [
        ("FULL_DECODE_ONLY", part) for part in PARTS
    ]
    assert all(row["step_us"] > 0 and row["low_us"] <= row["high_us"] for row in rows)
