"""Starts in processes of their own, and cache directories that were filled once for all tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Outcome = dict[str, Any]
StartOnce = Callable[..., Outcome]

PROGRAM = Path(__file__).with_name("start_once.py")


@pytest.fixture(scope="session")
def start_once() -> StartOnce:
    """`start_once(cache, environ={…}, layers=4, …)`: what a fresh process told of its start."""

    def run(cache: Path, environ: dict[str, str] | None = None, **options: Any) -> Outcome:
        command = [sys.executable, str(PROGRAM), str(cache), json.dumps({"layers": 4, **options})]
        done = subprocess.run(
            command, env={**os.environ, **(environ or {})}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        outcome: Outcome = json.loads(done.stdout.splitlines()[-1])
        return outcome

    return run


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory, start_once: StartOnce) -> Path:
    """A cache with the bundles of 4 and of 32 layers, as Inductor's artifacts."""
    root = tmp_path_factory.mktemp("fleet") / "artifacts"
    assert not start_once(root)["hit"]
    deep = start_once(root, layers=32)
    assert "inductor_compiles" not in deep["counters"]
    return root


@pytest.fixture(scope="session")
def filled_ahead(filled: Path, start_once: StartOnce) -> Path:
    """The same with AOTInductor libraries."""
    root = filled.with_name("libraries")
    shutil.copytree(filled, root)
    start_once(root, ahead=True)
    start_once(root, ahead=True, layers=32)
    return root


@pytest.fixture(params=["artifacts", "libraries"])
def form(request: pytest.FixtureRequest) -> Path:
    """A filled cache of either form; to be copied before it is changed."""
    name = {"artifacts": "filled", "libraries": "filled_ahead"}[request.param]
    root: Path = request.getfixturevalue(name)
    return root


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a container without a compiler, torch's own directories empty."""
    empty = tmp_path / "empty"
    empty.mkdir()
    return {
        "PATH": str(empty),
        "TORCHINDUCTOR_CACHE_DIR": str(empty / "inductor"),
        "TRITON_CACHE_DIR": str(empty / "triton"),
        "HOME": str(empty),
    }
