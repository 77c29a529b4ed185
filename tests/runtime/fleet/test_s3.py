"""Machines with separate directories that share a layer on an S3 server, in real processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import Outcome, starts

pytestmark = [pytest.mark.compile, pytest.mark.slow, pytest.mark.heavy]

MACHINES = 6


Machines = Callable[..., list[Outcome]]


@pytest.fixture
def start_machines(bucket: str) -> Machines:
    """`start_machines(directory, **options)`: the outcomes of machines that start at the same time,
    with directories of their own and one bucket."""
    layer = {"at": f"{bucket}/cache", "write_back": True, "trust": "anybody"}

    def start(directory: Path, **options: Any) -> list[Outcome]:
        settings = {"cache": {"layers": [layer], "verify_bundle": "off"}, **options}
        with ThreadPoolExecutor(MACHINES) as machines:
            directories = [directory / str(machine) for machine in range(MACHINES)]
            return [
                outcome
                for (outcome,) in machines.map(lambda own: starts(own, [settings]), directories)
            ]

    return start


def compiles(outcomes: list[Outcome]) -> list[int]:
    return sorted(outcome["counters"].get("inductor_compiles", 0) for outcome in outcomes)


def test_one_of_six_cold_machines_compiles(start_machines: Machines, tmp_path: Path) -> None:
    outcomes = start_machines(tmp_path / "first")
    assert max(outcome["error_of_results"] for outcome in outcomes) < 1e-5
    *waited, compiled = compiles(outcomes)
    assert waited == [0] * (MACHINES - 1)
    assert compiled > 0
    assert sum(outcome["hit"] for outcome in outcomes) == MACHINES - 1
    warm = start_machines(tmp_path / "second")
    assert compiles(warm) == [0] * MACHINES
    assert all(outcome["hit"] for outcome in warm)


def test_machines_serve_uncompiled_while_one_of_them_compiles(
    start_machines: Machines, tmp_path: Path
) -> None:
    outcomes = start_machines(tmp_path, bundle="serve")
    *waited, compiled = compiles(outcomes)
    assert waited == [0] * (MACHINES - 1)
    assert compiled > 0
    for outcome in outcomes:
        assert outcome["background"] is None or outcome["background"]["state"] == "compiled"
        assert max(outcome["error_of_uncompiled"], outcome["error_of_results"]) < 1e-5
