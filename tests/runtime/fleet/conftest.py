"""Starts in separate processes, and cache directories that are filled once for all tests."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import output_of

PROGRAM = Path(__file__).with_name("start_once.py")
SIZES_OF_MODELS = (4, 12)


def command_of(cache, each):
    """The command of a process that starts several times."""
    arguments = [json.dumps({"layers": 4, **options}) for options in each]
    return [sys.executable, str(PROGRAM), str(cache), *arguments]


def starts(cache, each, environ=None, before=()):
    """The outcomes of several starts in one fresh process, whose command follows `before`."""
    out = output_of(*before, *command_of(cache, each), env={**os.environ, **(environ or {})})
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="session")
def start_once():
    """`start_once(cache, environ={…}, layers=4, …)`: the outcome of a start in a fresh process."""

    def run(cache, environ=None, **options):
        (outcome,) = starts(cache, [options], environ)
        return outcome

    return run


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """A cache with the bundles of 4 and of 12 layers, as Inductor's artifacts."""
    root = tmp_path_factory.mktemp("fleet") / "artifacts"
    few, many = starts(root, [{"layers": layers} for layers in SIZES_OF_MODELS])
    assert not few["hit"]
    assert "inductor_compiles" not in many["counters"]
    return root


@pytest.fixture(scope="session")
def filled_ahead(filled):
    """The same with AOTInductor libraries."""
    root = filled.with_name("libraries")
    shutil.copytree(filled, root)
    built = starts(root, [{"layers": layers, "ahead": True} for layers in SIZES_OF_MODELS])
    assert [outcome["hit"] for outcome in built] == [True, True]
    return root


@pytest.fixture(params=["artifacts", pytest.param("libraries", marks=pytest.mark.heavy)])
def form(request):
    """A filled cache of either form. A test that changes it works on a copy."""
    name = {"artifacts": "filled", "libraries": "filled_ahead"}[request.param]
    return request.getfixturevalue(name)


@pytest.fixture
def bare(tmp_path):
    """The environment of a container without a compiler, with torch at another path and its own
    directories empty."""
    empty, packages = tmp_path / "empty", tmp_path / "packages"
    empty.mkdir()
    packages.mkdir()
    (packages / "torch").symlink_to(Path(torch.__file__).parent)
    return {
        "PYTHONPATH": str(packages),
        "PATH": str(empty),
        "TORCHINDUCTOR_CACHE_DIR": str(empty / "inductor"),
        "TRITON_CACHE_DIR": str(empty / "triton"),
        "HOME": str(empty),
    }
