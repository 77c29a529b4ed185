"""How long does a start take, cold and warm, and how does it grow with layers?

Each start runs in its own process. `cold` has an empty cache, `warm` loads Inductor's
artifacts, `warm_ahead` AOTInductor libraries. They are compared with `torch.compile(fullgraph=True,
dynamic=True)` of the same model, first with its own empty cache, then with that cache filled.
Times are from a built model until it can serve; `import torch` is not in them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PHASES = {
    "trace": "trace.dynamo",
    "split": "split",
    "compile": "compile",
    "store": "cache.store",
    "look_up": "cache.lookup",
    "load": "bundle.load",
    "libraries": "compile.library",
}
"""Columns, and the spans they sum, in seconds; None where a start has no such phase."""


def run(quick: bool) -> dict[str, Any]:
    """`ratios` compare medians at the largest depth; `slope_…` growth per layer over the depths."""
    layers = (4, 32) if quick else (4, 16, 32, 64)
    _warm_up_toolchain()
    rows = [row for depth in layers for row in _rows(depth)]
    seconds = {(row["way"], row["layers"]): row["ready"] for row in rows}
    first, last = layers[0], layers[-1]

    def slope(way: str) -> float:
        return float(seconds[way, last] - seconds[way, first]) / (last - first)

    most = 32 if 32 in layers else last
    return {
        "ratios": {
            "cold_over_torch_compile": seconds["cold", most] / seconds["compile_cold", most],
            "slope_over_torch_compile": slope("cold") / slope("compile_cold"),
            "warm_over_cold": seconds["warm", most] / seconds["cold", most],
            "warm_ahead_over_cold": seconds["warm_ahead", most] / seconds["cold", most],
        },
        "layers": most,
        "columns": ["way", "layers", "ready", "trace", "compile", "load", "libraries"],
        "rows": rows,
    }


def _rows(layers: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        starts = {
            "cold": _start("piecegraph", layers, ours, theirs / "unused"),
            "warm": _start("piecegraph", layers, ours, theirs / "unused"),
            "ahead": _start("ahead", layers, ours, theirs / "unused"),
            "warm_ahead": _start("piecegraph", layers, ours, theirs / "unused"),
            "compile_cold": _start("torch.compile", layers, ours, theirs / "plain"),
            "compile_warm": _start("torch.compile", layers, ours, theirs / "plain"),
        }
    return [{"way": way, "layers": layers, **start} for way, start in starts.items()]


def _start(way: str, layers: int, ours: Path, theirs: Path) -> dict[str, Any]:
    theirs.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", f"{__package__}._prepare_once", way, str(layers), str(ours)]
    command = ["env", f"TORCHINDUCTOR_CACHE_DIR={theirs}", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    start: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    phases = start.pop("phases")
    return {**start, **{name: phases.get(span) for name, span in PHASES.items()}}


def _warm_up_toolchain() -> None:
    """Build what torch builds once per machine (precompiled headers), before anything is timed."""
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
        for way in ("piecegraph", "torch.compile"):
            _start(way, 1, Path(folder) / way, Path(folder) / "inductor")
