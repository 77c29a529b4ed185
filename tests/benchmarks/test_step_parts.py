"""The benchmark of parts: a row per part and mode."""

from piecegraph.benchmarks.step_parts import STEPS, run
from piecegraph.runtime.setup.switches import PARTS


def test_each_part_has_a_row_in_each_mode():
    rows = run(quick=True)["rows"]
    assert [(row["mode"], row["part"]) for row in rows] == [
        (mode.name, part) for mode in STEPS for part in PARTS
    ]
    assert all(row["step_us"] > 0 and row["low_us"] <= row["high_us"] for row in rows)
