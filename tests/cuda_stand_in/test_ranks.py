"""Two ranks with a collective inside pieces and FULL graphs, one of which cannot capture a size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCENE = Path(__file__).with_name("rank_scene.py")


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_rank_that_cannot_capture_leaves_no_other_rank_in_a_collective(
    tmp_path: Path, mode: str
) -> None:
    """Nor does a collective run in a capture: its memory is registered afterwards."""
    arguments = [str(tmp_path), mode]
    ranks = [
        subprocess.Popen([sys.executable, str(SCENE), str(rank), *arguments]) for rank in (0, 1)
    ]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    for rank in (0, 1):
        told = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert told["errors"] == []
        assert sorted(told["graphs"]) == [f"{mode} 16", f"{mode} 4"]
        assert told["results"] == [[13.0]] * 4
        (failure,) = told["failures"]
        assert failure.startswith("rank 1: ")
        assert "rank 1 has no memory for this capture" in failure
