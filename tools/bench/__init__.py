"""Benchmarks, one file a question; each compares within one run.

A benchmark is a module with `run(quick: bool)` that returns `ratios`, named medians of paired
runs, and `rows`, a list of dicts with equal keys: what was measured.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, Protocol, cast


class Benchmark(Protocol):
    def run(self, quick: bool) -> dict[str, Any]: ...


def names() -> list[str]:
    """The benchmarks there are: the package's modules, those with an underscore aside."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if not name.startswith("_"))


def find(name: str) -> Benchmark:
    """The benchmark called `name`, one of `names()`."""
    return cast(Benchmark, importlib.import_module(f".{name}", __name__))
