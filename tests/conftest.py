"""For all rooms: properties without a deadline, a young heap, GPU tests on a GPU alone."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

import piecegraph

# judged by what they find, not by how long one example takes on a busy machine
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


ROOT = Path(piecegraph.__file__).parent


@pytest.fixture(scope="session")
def package_sources() -> dict[str, Path]:
    """Every Python file of the package itself, by its name relative to the package."""
    names = {path.relative_to(ROOT): path for path in ROOT.rglob("*.py")}
    apart = {"tests", ".venv", ".typing", "build"}
    return {name.as_posix(): path for name, path in names.items() if not apart & {*name.parts}}


@pytest.fixture(autouse=True, scope="module")
def young_heap() -> None:
    """What earlier tests left on the heap does not slow the collections of later ones.

    A capture session collects garbage; with all of torch's compilers loaded that takes a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def gpu_or_skip(request: pytest.FixtureRequest) -> None:
    """A test marked `gpu` is skipped, and says so, where there is no device."""
    if request.node.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device: this is NOT tested here")
