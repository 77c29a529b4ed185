"""Two ranks with a collective inside pieces and FULL graphs, one of which cannot capture a size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCENE = Path(__file__).with_name("rank_scene.py")


pytestmark = pytest.mark.usefixtures("stand_in")  # on a device two processes need two of them


def run_ranks(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    ranks = [
        subprocess.Popen([sys.executable, str(SCENE), str(rank), str(folder), *arguments])
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_rank_that_cannot_capture_leaves_no_other_rank_in_a_collective(tmp_path, mode):
    """Nor does a collective run in a capture: its memory is registered afterwards."""
    for told in run_ranks(tmp_path, mode):
        assert told["errors"] == []
        assert sorted(told["graphs"]) == [f"{mode} 16", f"{mode} 4"]
        assert told["results"] == [[13.0]] * 4
        (failure,) = told["failures"]
        assert failure.startswith("rank 1: ")
        assert "rank 1 has no memory for this capture" in failure


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_rank_that_cannot_probe_leaves_no_other_rank_in_a_collective(tmp_path, mode):
    """A memory limit makes probes. They run collectives, so that all ranks probe the same sizes."""
    for told in run_ranks(tmp_path, mode, str(1 << 30)):
        assert told["errors"] == []
        assert sorted(told["graphs"]) == [f"{mode} 16", f"{mode} 8"]
        assert told["results"] == [[13.0]] * 4
        assert told["failures"] == []
