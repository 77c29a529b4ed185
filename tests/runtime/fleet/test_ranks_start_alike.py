"""Ranks that start together all take the bundle or none does, over a real process group."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import Outcome, StartOnce

pytestmark = [pytest.mark.compile, pytest.mark.slow]


def start_together(start_once: StartOnce, caches: list[Path], meeting: Path) -> list[Outcome]:
    with ThreadPoolExecutor(len(caches)) as pool:
        starts = [
            pool.submit(start_once, cache, rank=[rank, len(caches), str(meeting)])
            for rank, cache in enumerate(caches)
        ]
        return [start.result(timeout=240) for start in starts]


def test_all_ranks_load_where_all_have_the_bundle(
    filled: Path, start_once: StartOnce, tmp_path: Path
) -> None:
    outcomes = start_together(start_once, [filled, filled], tmp_path / "meeting")
    assert [outcome["hit"] for outcome in outcomes] == [True, True]


def test_vllm_57423_no_rank_loads_where_one_lacks_the_bundle(
    filled: Path, start_once: StartOnce, tmp_path: Path
) -> None:
    lacking = tmp_path / "lacking"
    shutil.copytree(filled, lacking)
    for bundle in lacking.glob("entries-*/bundle"):
        shutil.rmtree(bundle)
    outcomes = start_together(start_once, [filled, lacking], tmp_path / "meeting")
    assert [outcome["hit"] for outcome in outcomes] == [False, False]
    assert "rank 1 has none" in outcomes[0]["reason"]
    assert all("inductor_compiles" not in outcome["counters"] for outcome in outcomes)
    assert max(outcome["error_of_results"] for outcome in outcomes) < 1e-4
