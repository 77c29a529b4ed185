"""Benchmarks. Those of `load` and `serving` measure an engine under load.

The others compare two ways of doing something within one run. Such a benchmark is a module with
`run(quick: bool)` that returns `ratios`, named medians of paired runs, and `rows`, a list of dicts
with equal keys: what was measured. It may also return `columns`, which of them a table shows, and a
`note` for its title, and have a function `plot(result, path)` that draws them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from ...errors import InvalidSetting
from ..report.output import figure_class


class Benchmark(Protocol):
    def run(self, quick: bool) -> dict[str, Any]: ...


def find(name: str) -> Benchmark:
    """The benchmark in the module called `name`."""
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
