"""How long does a start take, cold and warm, and how does it grow with layers?

Each start runs in its own process, and of warm starts the median of three is reported. `cold` has
an empty cache, `served` too, and serves the model uncompiled while it is compiled beside its steps;
`warm` loads Inductor's artifacts, `warm_ahead` AOTInductor libraries, which `ahead` builds, from
the artifacts of `cold` if that was measured too. `verified` is `warm_ahead` with its bundle
verified beside it, in turn with starts without.
They are compared with `torch.compile(fullgraph=True, dynamic=True)` of the same model, first with
its own empty cache, then with that cache filled, and with `torch.compile` of each layer alone
(`compile_regional`, cold). `hugging_face` is `warm_ahead` of a Llama.
Times are from a built model until it can serve; `import torch` is not in them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from statistics import quantiles
from typing import Any

from piecegraph.tools.report.origin import origin

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

MEASURED = (
    *("prepare_ms", "conditions_ms", "num_conditions", "compiler_imported"),
    *("traced", "switch", "pause_ms", "tracing_over_eager", "longest_tracing_s", "speed_compiling"),
)
"""What only some starts measure."""

COLUMNS = [
    *("way", "layers", "ready", "trace", "compile", "load", "libraries"),
    *("prepare_ms", "conditions_ms", "num_conditions", "traced", "switch"),
    *("tracing_over_eager", "longest_tracing_s", "speed_compiling"),
]

WAYS = {
    "served": "",
    "cold": "",
    "warm": "cold",
    "ahead": "",
    "warm_ahead": "ahead",
    "verified": "ahead",
    "compile_cold": "",
    "compile_warm": "compile_cold",
    "compile_regional": "",
    "hugging_face": "",
}
"""The ways to start, in this order, and the way that fills the cache of each."""

STARTED_AS = {
    "served": "served",
    "ahead": "ahead",
    "compile_cold": "torch.compile",
    "compile_warm": "torch.compile",
    "compile_regional": "regional",
}
RATIOS = {
    "served_ready_over_cold": ("served", "cold"),
    "cold_over_torch_compile": ("cold", "compile_cold"),
    "warm_over_cold": ("warm", "cold"),
    "warm_ahead_over_cold": ("warm_ahead", "cold"),
    "ahead_over_cold": ("ahead", "cold"),
}
HUGGING_FACE_LAYERS = 80
PAIRS = 7
"""Of starts of `verified`, with and without verification in turn."""


def run(quick: bool, ways: Collection[str] = tuple(WAYS)) -> dict[str, Any]:
    """`ratios` compare `ready` at 32 layers; `slope_…` its growth per layer over the depths.

    Rows of warm starts say how long `prepare` takes without imports, how long the conditions of
    the bundle are checked, how many there are, and whether Dynamo or Inductor was imported.
    """
    ways = {*ways, *(WAYS[way] for way in ways if WAYS[way])}
    for_slope = {"cold", "compile_cold"}
    layers: tuple[int, ...] = (4, 16, 32, 80)
    if quick:
        layers = (4, 32) if for_slope <= ways else (32,)
    _warm_up_toolchain([way for way in ("cold", "ahead", "compile_cold") if way in {*ways, "cold"}])
    rows = [row for depth in layers for row in _rows(depth, ways)]
    seconds = {(row["way"], row["layers"]): row["ready"] for row in rows}
    ratios = {
        name: seconds[over, 32] / seconds[under, 32]
        for name, (over, under) in RATIOS.items()
        if {over, under} <= ways
    }
    if for_slope <= ways:
        first, last = layers[0], layers[-1]
        ours, theirs = (
            seconds[way, last] - seconds[way, first] for way in ("cold", "compile_cold")
        )
        ratios["slope_over_torch_compile"] = ours / theirs
    quartiles = {}
    if paired := [row.pop("over_unverified") for row in rows if row["way"] == "verified"]:
        quartiles["verified_over_unverified"] = quantiles(paired[-1])
        ratios["verified_over_unverified"] = quartiles["verified_over_unverified"].pop(1)
    return {
        "ratios": ratios,
        "quartiles": quartiles,
        "machine": origin()["machine"],
        "layers": 32,
        "columns": COLUMNS,
        "rows": rows + (_hugging_face() if "hugging_face" in ways else []),
    }


def _rows(layers: int, ways: Collection[str]) -> list[dict[str, Any]]:
    """One row for each of `ways`, in the order of WAYS, since one fills the cache of the next."""
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
        ours, served = Path(folder) / "ours", Path(folder) / "served"
        return [
            {"way": way, "layers": layers}
            | _start(
                way,
                layers,
                served if way == "served" else ours,
                Path(folder) / ("regional" if way == "compile_regional" else "inductor"),
            )
            for way in WAYS
            if way in ways and way != "hugging_face"
        ]


def _hugging_face() -> list[dict[str, Any]]:
    """A Llama, if transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        return []
    layers = HUGGING_FACE_LAYERS
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
        places = Path(folder) / "ours", Path(folder) / "inductor"
        _start("ahead", layers, *places, "hugging_face")
        warm = _start("warm_ahead", layers, *places, "hugging_face")
    return [{"way": "hugging_face", "layers": layers, **warm}]


def _start(
    way: str, layers: int, ours: Path, theirs: Path, model: str = "reference"
) -> dict[str, Any]:
    """What a start took; of three warm ones the median."""
    theirs.mkdir(parents=True, exist_ok=True)
    arguments = [STARTED_AS.get(way, "piecegraph"), str(layers), str(ours), model]
    paired: dict[str, Any] = {}
    if way == "verified":
        pairs = [
            [_once(theirs, [*arguments, verify]) for verify in ("off", "background")]
            for _ in range(PAIRS)
        ]
        starts = [verified for _, verified in pairs]
        paired["over_unverified"] = [two["ready"] / one["ready"] for one, two in pairs]
    else:
        starts = [_once(theirs, arguments) for _ in range(3 if "warm" in way else 1)]
    start = sorted(starts, key=lambda each: float(each["ready"]))[len(starts) // 2]
    phases = start.pop("phases")
    columns = {name: phases.get(span) for name, span in PHASES.items()}
    return {**dict.fromkeys(MEASURED), **start, **columns, **paired}


def _once(theirs: Path, arguments: list[str]) -> dict[str, Any]:
    """What one start in its own process prints."""
    program = [sys.executable, "-P", str(Path(__file__).with_name("prepare_once.py")), *arguments]
    command = ["env", f"TORCHINDUCTOR_CACHE_DIR={theirs}", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _warm_up_toolchain(ways: Collection[str]) -> None:
    """Build what is built once per machine (precompiled headers), before anything is timed."""
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
        for way in ways:
            _start(way, 1, Path(folder) / way, Path(folder) / "inductor")
