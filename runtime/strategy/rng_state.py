"""Dummy batches may draw random numbers; outside, nobody can tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def same_random_state() -> Iterator[None]:
    """Put torch's generators back as they were, those of a device only if it is in use."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if in_use else ()
    with torch.random.fork_rng(devices=devices):
        yield
