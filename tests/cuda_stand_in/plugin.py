"""pytest plugin of `make cuda-test`: values for the kernels, and all of their errors are reported.

The process has to be started with the stand-in preloaded (see run.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from . import values


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_KEPT] = values.install()
    if os.environ.get("TRITON_INTERPRET") == "1":
        from . import triton_values

        triton_values.install()


_KEPT = pytest.StashKey[torch.library.Library]()


@pytest.fixture(autouse=True)
def no_kernel_failed() -> Iterator[None]:
    """A body that raised on the stream fails the test that submitted it."""
    values.errors.clear()
    yield
    torch.cuda.synchronize()
    failed = [f"{type(error).__name__}: {error}" for error in values.errors]
    values.errors.clear()
    assert failed == []
