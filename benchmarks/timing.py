"""Times functions in turn, so that all of them see the same load and clock speed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("piecegraph_bench", "DEF")  # type: ignore[no-untyped-call]
"""The ops of benchmarks."""


def interleaved(
    fns: Sequence[Callable[[], Any]], rounds: int, times: int
) -> list[tuple[float, ...]]:
    """Microseconds of this thread's CPU time per call, for each function and round."""
    with collection_off(), torch.no_grad():
        for fn in fns:
            fn()
        measured = [[_microseconds(fn, times) for fn in fns] for _ in range(rounds)]
    return list(zip(*measured, strict=True))


@contextmanager
def collection_off() -> Iterator[None]:
    """Without garbage collection."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def row(step: str, other: str, times: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """One row of a table: two steps in microseconds, and their ratio."""
    return {
        "step": step,
        "us": median(times),
        "beside": other,
        "other_us": median(others),
        "over": median(one / two for one, two in zip(times, others, strict=True)),
    }


def _microseconds(fn: Callable[[], Any], times: int) -> float:
    began = time.thread_time_ns()
    for _ in range(times):
        fn()
    return (time.thread_time_ns() - began) / times / 1000
