"""Benchmarks: one file for each question. Each benchmark compares within one run.

A benchmark is a module with `run(quick: bool)` that returns `ratios`, named medians of paired
runs, and `rows`, a list of dicts with equal keys: what was measured. It may also return `columns`,
which of them a table shows, and a `note` for its title, and have a function `plot(result, path)`
that draws them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from ...errors import InvalidSetting
from ..report.output import figure_class


class Benchmark(Protocol):
    def run(self, quick: bool) -> dict[str, Any]: ...


def names() -> list[str]:
    """Names of the benchmarks: the package's modules without a leading underscore."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if not name.startswith("_"))


def find(name: str) -> Benchmark:
    """The benchmark called `name`; raises InvalidSetting if there is none."""
    if name not in names():
        raise InvalidSetting(
            name="bench",
            value=name,
            reason="there is no such benchmark",
            expected="one of " + ", ".join(names()),
        )
    return cast(Benchmark, importlib.import_module(f".{name}", __name__))


def plotter(benchmark: Benchmark, path: Path) -> Callable[[dict[str, Any]], None]:
    """The function that draws a result of `benchmark` into the image `path`.

    Raises InvalidSetting for one that cannot be drawn, ToolMissing without matplotlib.
    """
    plot = getattr(benchmark, "plot", None)
    if plot is None:
        raise InvalidSetting(
            name="--plot", value=str(path), reason="this benchmark has no plot", expected="none"
        )
    figure_class()
    return partial(plot, path=path)
