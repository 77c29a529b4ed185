"""Tests of the cuda backend on torch's real CUDA code over the stand-in: `make cuda-test`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .control import StandIn

HERE = Path(__file__).parent
EXPANDABLE = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
MAPPING = 20 << 20
"""With expandable segments torch maps this much memory at a time, or a multiple."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if item.get_closest_marker("slow"):  # compiles with ptxas and g++
                item.add_marker(pytest.mark.timeout(1800))
    yield
    # up to torch 2.12, memory is not given back in a process with a capture that was invalidated,
    # and before 2.12 workspaces are not in one with graphs of others
    last = ("test_examples.py", "test_captures.py", "test_cuda.py")
    items.sort(key=lambda item: item.path.name in last)


def on_stand_in() -> bool:
    return hasattr(ctypes.CDLL("libcudart.so.13"), "stand_in_inject")


@pytest.fixture
def without_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that look at memory only: kernels do nothing. On a device they compute."""
    import torch

    if not on_stand_in():
        yield
        return
    from tests.cuda_stand_in import values

    monkeypatch.setattr("piecegraph.compile.plan.result_forms._MOST_BYTES", 0)  # nothing to compare
    with values.without_computing():
        yield
        torch.cuda.synchronize()


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """Faults, limits and seeds; a test that needs them skips on a real device, and says so."""
    import torch

    if not on_stand_in():
        pytest.skip("needs the stand-in for the CUDA runtime: make cuda-test")
    made = StandIn()
    limit = torch.cuda.mem_get_info()[1]
    yield made
    made.clear_faults()
    made.limit_memory(limit)
    made.poison_up_to(64 << 20)
