"""Machines with separate directories that share a layer on an S3 server, in real processes.

`pip install 'moto[server]' s3fs` brings the server and the file system.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import Outcome, starts

pytestmark = [pytest.mark.compile, pytest.mark.slow, pytest.mark.heavy]

MACHINES = 6


Machines = Callable[..., list[Outcome]]


@pytest.fixture
def start_machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """`start_machines(directory, **options)`: the outcomes of machines that start at the same time,
    with directories of their own and one bucket."""
    server_module, s3fs = pytest.importorskip("moto.server"), pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    environ = {"FSSPEC_S3_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    bucket = uuid.uuid4().hex
    s3fs.S3FileSystem(endpoint_url=url, skip_instance_cache=True).mkdir(bucket)
    layer = {"at": f"s3://{bucket}/cache", "write_back": True, "trust": "anybody"}

    def start(directory: Path, **options: Any) -> list[Outcome]:
        settings = {"cache": {"layers": [layer], "verify_bundle": "off"}, **options}
        with ThreadPoolExecutor(MACHINES) as machines:
            directories = [directory / str(machine) for machine in range(MACHINES)]
            return [
                outcome
                for (outcome,) in machines.map(lambda own: starts(own, [settings]), directories)
            ]

    yield start
    server.stop()


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
