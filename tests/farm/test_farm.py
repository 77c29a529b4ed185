"""Pieces are compiled by Dask, Ray and processes: `make farm-test`."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Timer
from typing import Any

import distributed
import pytest
import ray
import torch

from piecegraph import Batch, Config, Events, compile_ahead, prepare
from piecegraph.cache.inspection import manifests
from piecegraph.cache.names import blob_name
from piecegraph.compile.backends import in_workers
from tests.compile import ops as _registers  # noqa: F401
from tests.compile.models import MIX, Stack, X
from tests.farm.worker_calls import of_another_version, process

Farm = Callable[[int], Any]


class OnRay(Executor):
    """Each call is a task of Ray, as docs/starts.md has it."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = ray.remote(fn).remote(*args, **kwargs).future()
        return future


@contextmanager
def on_ray(count: int) -> Iterator[Executor]:
    ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False)
    try:
        yield OnRay()
    finally:
        ray.shutdown()


@contextmanager
def on_dask(count: int) -> Iterator[Executor]:
    settings = {"n_workers": count, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**settings) as on, distributed.Client(on) as client:
        yield client.get_executor()


@contextmanager
def in_processes(count: int) -> Iterator[Executor]:
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Workers of a farm may take minutes to start: this process leaves them all pieces."""
    monkeypatch.setattr(in_workers, "PATIENCE_SECONDS", in_workers.SILENT_SECONDS)


def start(folder: Path, executor: Executor | None = None, most: int = 1) -> tuple[Any, Events]:
    """A start of three unique pieces, compiled for all sizes and for each up to `most`."""
    torch.manual_seed(0)
    model, events = Stack(2).eval(), Events()
    sizes = tuple(range(1, most + 1))
    settings = Config(
        inputs=X, splitting_ops=MIX, max_num_tokens=16, level=3, codegen={"sizes": sizes},
        cache_dir=folder, graph_mode="NONE",
    )  # fmt: skip
    served = prepare(model, settings, events=events, executor=executor)
    for size in (1, most, 16):
        x = torch.randn(size, 8)
        torch.testing.assert_close(served(x, batch=Batch(size, 1)), model(x))
    served.close()
    return settings, events


def entries(folder: Path) -> set[tuple[str, str, str, str]]:
    """Kind, key, blob and content of all that a cache holds; a kernel is named by its source.

    Torch writes a counter of the process and addresses into code, and its folder into both: code is
    named only, and of a kernel the machine code is its content.
    """
    held = set()
    for manifest, _ in manifests(folder):
        for name, blob in manifest.blobs.items():
            content = blob.sha256
            if name.endswith(".so"):
                section = ["objcopy", "-O", "binary", "-j", ".text", folder / blob_name(content)]
                text = subprocess.run([*section, "/dev/stdout"], check=True, capture_output=True)
                assert len(text.stdout) > 1000
                content = hashlib.sha256(text.stdout).hexdigest()
            elif name.rpartition(".")[2] == "code":
                content = ""
            held.add((manifest.kind, manifest.key.digest, name, content))
    return held


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What this process alone makes of 27 pieces: three unique ones for eight sizes and for all."""
    folder = tmp_path_factory.mktemp("alone")
    return start(folder, most=8)[1], entries(folder)


@pytest.mark.parametrize("farm", [on_dask, on_ray, in_processes])
@pytest.mark.parametrize("count", [1, 2])
def test_a_bundle_is_the_one_that_this_process_alone_makes(farm, count, alone, tmp_path):
    with farm(count) as executor:
        _, shared = start(tmp_path, executor, most=8)
    ends = [event.facts.get("by") for event in shared.named("compile.end")]
    assert ends == ["worker"] * 27
    assert shared.counters["inductor_compiles"] == alone[0].counters["inductor_compiles"] == 27
    assert entries(tmp_path) == alone[1]
    _, warm = start(tmp_path, most=8)
    assert warm.counters["inductor_compiles"] == 0


@pytest.mark.parametrize(
    ("farm", "lost"), [(on_dask, False), (on_ray, False), (in_processes, True)]
)
def test_a_worker_that_is_killed_costs_time_only(farm, lost, tmp_path):
    """Dask and Ray start another one. An executor of processes is broken by it: all that it has is
    compiled here."""
    with farm(1) as executor:
        worker = executor.submit(process).result(600)
        kill = Timer(5.0, partial(os.kill, worker, signal.SIGKILL))
        kill.start()
        _, events = start(tmp_path, executor)
        assert not kill.is_alive(), "it was killed later"
        assert lost or executor.submit(process).result(600) != worker
    reasons = [event.facts["reason"] for event in events.named("compile.here")]
    assert any("terminated abruptly" in reason for reason in reasons) is lost, reasons
    _, warm = start(tmp_path)
    assert warm.counters["inductor_compiles"] == 0


def test_a_worker_of_another_torch_is_refused_by_name(tmp_path):
    with ProcessPoolExecutor(1, get_context("spawn"), of_another_version) as executor:
        _, events = start(tmp_path, executor)
    reasons = {event.facts["reason"] for event in events.named("compile.here")}
    assert any("2.11.0" in reason for reason in reasons), reasons


def test_libraries_are_built_by_a_farm(tmp_path):
    with in_processes(2) as executor:
        settings, _ = start(tmp_path, executor)
        assert compile_ahead(Stack(2).eval(), settings, executor=executor)
    _, warm = start(tmp_path)
    assert [span for span in warm.spans if span.name == "bundle.libraries"]
