"""How long does a start take, cold and warm, and how does it grow with layers?

Each start runs in its own process. `cold` has an empty cache, `served` too, and serves the model
uncompiled while a child process compiles it; `warm` loads Inductor's artifacts, `ahead` builds
AOTInductor libraries, `warm_ahead` loads them. They are compared with
`torch.compile(fullgraph=True, dynamic=True)` of the same model, first with its own empty cache,
then with that cache filled.
Times are from a built model until it can serve; `import torch` is not in them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..report.output import figure_class
from ..serve.report import origin

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

MEASURED = ("conditions_ms", "num_conditions", "switch", "pause_ms", "uncompiled_over_eager")
"""What only some starts measure."""


def run(quick: bool) -> dict[str, Any]:
    """`ratios` compare medians at the largest depth; `slope_…` growth per layer over the depths.

    Rows of warm starts say how long the conditions of the bundle are checked, and how many there
    are; the last is of a Llama.
    """
    layers = (4, 32) if quick else (4, 16, 32, 80)
    _warm_up_toolchain()
    rows = [row for depth in layers for row in _rows(depth)]
    seconds = {(row["way"], row["layers"]): row["ready"] for row in rows}
    first, last = layers[0], layers[-1]

    def slope(way: str) -> float:
        return float(seconds[way, last] - seconds[way, first]) / (last - first)

    most = 32 if 32 in layers else last
    return {
        "ratios": {
            "served_ready_over_cold": seconds["served", most] / seconds["cold", most],
            "cold_over_torch_compile": seconds["cold", most] / seconds["compile_cold", most],
            "slope_over_torch_compile": slope("cold") / slope("compile_cold"),
            "warm_over_cold": seconds["warm", most] / seconds["cold", most],
            "warm_ahead_over_cold": seconds["warm_ahead", most] / seconds["cold", most],
            "ahead_over_cold": seconds["ahead", most] / seconds["cold", most],
        },
        "machine": origin()["machine"],
        "layers": most,
        "columns": ["way", "layers", "ready", "trace", "compile", "load", "libraries", "switch"],
        "rows": rows + _hugging_face(8 if quick else 80),
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Waterfalls: the phases of each start at the largest depth, one after the other."""
    figure = figure_class()(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    depth = max(row["layers"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["layers"] == depth][::-1]
    names = ["import_torch", "model", *PHASES, "rest"]
    for place, row in enumerate(rows):
        spent = {name: row.get(name) or 0.0 for name in names[:-1]}
        end = row["import_torch"] + row["model"] + row["ready"]
        spent["rest"] = max(0.0, end - sum(spent.values()))
        start = 0.0
        for index, (name, seconds) in enumerate(spent.items()):
            axes.barh(place, seconds, left=start, color=f"C{index}", label=name)
            start += seconds
        if row.get("switch"):
            axes.plot(start + row["switch"] - row["ready"], place, "k|", markersize=14)
    axes.set_yticks(range(len(rows)), [row["way"] for row in rows])
    axes.set_xlabel(f"seconds from the start of the process, {depth} layers")
    shown = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    axes.legend(shown.values(), shown.keys(), fontsize="small")
    figure.savefig(path)


def _rows(layers: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        starts = {
            "served": _start("served", layers, Path(folder) / "served", theirs / "unused"),
            "cold": _start("piecegraph", layers, ours, theirs / "unused"),
            "warm": _start("piecegraph", layers, ours, theirs / "unused"),
            "ahead": _start("ahead", layers, ours, theirs / "unused"),
            "warm_ahead": _start("piecegraph", layers, ours, theirs / "unused"),
            "compile_cold": _start("torch.compile", layers, ours, theirs / "plain"),
            "compile_warm": _start("torch.compile", layers, ours, theirs / "plain"),
        }
    return [{"way": way, "layers": layers, **start} for way, start in starts.items()]


def _hugging_face(layers: int) -> list[dict[str, Any]]:
    """A Llama, if transformers is installed: how long its conditions are checked."""
    if importlib.util.find_spec("transformers") is None:
        return []
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "unused"
        _start("ahead", layers, ours, theirs, "hugging_face")
        warm = _start("piecegraph", layers, ours, theirs, "hugging_face")
    return [{"way": "hugging_face", "layers": layers, **warm}]


def _start(
    way: str, layers: int, ours: Path, theirs: Path, model: str = "reference"
) -> dict[str, Any]:
    theirs.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", f"{__package__}._prepare_once", way, str(layers), str(ours)]
    command = ["env", f"TORCHINDUCTOR_CACHE_DIR={theirs}", *program, model]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    start: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    phases = start.pop("phases")
    columns = {name: phases.get(span) for name, span in PHASES.items()}
    return {**dict.fromkeys(MEASURED), **start, **columns}


def _warm_up_toolchain() -> None:
    """Build what torch builds once per machine (precompiled headers), before anything is timed."""
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
        for way in ("piecegraph", "torch.compile"):
            _start(way, 1, Path(folder) / way, Path(folder) / "inductor")
