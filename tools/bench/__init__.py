"""Benchmarks, one file a question; each compares within one run.

A benchmark is a module with `run(quick: bool)` that returns `ratios`, named medians of paired
runs, and `rows`, a list of dicts with equal keys: what was measured. It may have a function
`plot(result, path)` that draws them.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any, Protocol, cast

from ...errors import InvalidSetting


class Benchmark(Protocol):
    def run(self, quick: bool) -> dict[str, Any]: ...


def draw(benchmark: Benchmark, result: dict[str, Any], path: Path) -> None:
    """Draw `result` into the image `path`; raises InvalidSetting for one that cannot be drawn."""
    plot = getattr(benchmark, "plot", None)
    if plot is None:
        raise InvalidSetting(
            name="--plot", value=str(path), reason="this benchmark has no plot", expected="none"
        )
    plot(result, path)


def names() -> list[str]:
    """The benchmarks there are: the package's modules, those with an underscore aside."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if not name.startswith("_"))


def find(name: str) -> Benchmark:
    """The benchmark called `name`, one of `names()`."""
    return cast(Benchmark, importlib.import_module(f".{name}", __name__))
