"""Ranks agree, or an error names the rank that differs or is lost; no rank ever hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # processes, and time-outs that are waited for

LAUNCHER = Path(__file__).with_name("rank_launcher.py")


@pytest.fixture
def play(tmp_path: Path) -> Any:
    plays = 0

    def play(scene: str, size: int, odd: int = -1) -> dict[int, dict[str, Any]]:
        """What came of each rank: all end by themselves, but for one that dies.

        `odd` is the rank that differs.
        """
        nonlocal plays
        plays += 1
        folder = tmp_path / str(plays)
        folder.mkdir()
        subprocess.run(
            [sys.executable, str(LAUNCHER), str(folder), str(size), scene, str(odd)],
            check=True,
            timeout=120,
        )
        outcomes = {rank: folder / f"rank-{rank}.json" for rank in range(size)}
        ended = {r: json.loads(path.read_text()) for r, path in outcomes.items() if path.exists()}
        assert ended.keys() == set(range(size)) - ({odd} if scene == "die" else set())
        return ended

    return play


@pytest.mark.parametrize("size", [2, 4])
def test_equal_ranks_agree(play: Any, size: int) -> None:
    assert [outcome["result"] for outcome in play("agree", size).values()] == [["agreed"]] * size


def test_a_rank_with_another_plan_is_named_by_all(play: Any) -> None:
    for outcome in play("disagree_on_sizes", 4, odd=2).values():
        assert outcome["error"] == "RanksDisagree"
        assert outcome["message"].startswith("rank 2 disagrees at 'start' on graph 0: rank 2: {")
        assert '"num_tokens": 2' in outcome["message"]


def test_a_rank_with_another_attention_is_named_by_all(play: Any) -> None:
    outcomes = play("disagree_on_attention", 2, odd=1)
    for outcome in outcomes.values():
        assert "rank 1 disagrees at 'start' on attention capabilities" in outcome["message"]
        assert '"NEVER"' in outcome["message"]


def test_failure_35_a_silent_rank_is_named_in_time(play: Any) -> None:
    outcomes = play("stay_away", 4, odd=1)
    assert outcomes.pop(1)["result"] == ["slept"]
    for outcome in outcomes.values():
        assert outcome["error"] == "RankLost"
        assert outcome["message"].startswith("rank 1 did not respond within 3.0 s at 'start'")
        assert outcome["seconds"] < 8


def test_failure_35_a_killed_rank_is_named_and_a_restart_works(play: Any) -> None:
    outcomes = play("die", 4, odd=3)
    for outcome in outcomes.values():
        assert outcome["error"] == "RankLost"
        assert "rank 3 did not respond" in outcome["message"]
        assert outcome["seconds"] < 8
    assert all(outcome["result"] == ["agreed"] for outcome in play("agree", 4).values())


def test_failure_35_a_graph_that_one_rank_lacks_is_used_by_none(play: Any) -> None:
    outcomes = play("one_cannot_capture", 2, odd=1)
    assert [outcome["result"] for outcome in outcomes.values()] == [["4", "1"]] * 2


def test_failure_35_ranks_that_see_other_batches_are_told_with_the_step(play: Any) -> None:
    outcomes = play("one_sees_another_batch", 4, odd=3)
    for outcome in outcomes.values():
        assert outcome["error"] == "RanksDisagree"
        assert "rank 3 disagrees" in outcome["message"]
        assert "at step 1" in outcome["message"]


def test_ranks_go_by_the_least_memory(play: Any) -> None:
    results = [outcome["result"] for outcome in play("limits_differ", 2, odd=1).values()]
    assert results[0] == results[1]
    assert len(results[0]) == 1
