"""How a cold start of the reference decoder at level 3 scales with cores, and its pieces alone.

Eight sizes have code of their own. It starts with this process alone, and with one worker beside
it, which two cores can show. For more workers the recorded seconds of the pieces are scheduled on
paper.
"""

from __future__ import annotations

import heapq
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .prepare_once import _reference

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SIMULATED = (2, 4, 8)


def run(quick: bool) -> dict[str, Any]:
    """`ratios` of the time to compile all pieces; simulated rows have nothing but that time."""
    layers = 4 if quick else 32
    alone, beside = (_start(layers, workers) for workers in (0, 1))
    pieces = alone["pieces"]
    simulated = {n: makespan(pieces, n) for n in SIMULATED}
    rows = [
        _row("measured", 0, alone["compile"], alone["ready"]),
        _row("measured", 1, beside["compile"], beside["ready"]),
        *(_row("simulated", n, seconds, None) for n, seconds in simulated.items()),
    ]
    return {
        "note": f"{layers} layers, {len(pieces)} pieces of {sum(pieces):.1f} s in all",
        "rows": rows,
        "pieces": pieces,
        "ratios": {
            "one_worker_over_alone": beside["compile"] / alone["compile"],
            **{
                f"simulated_{n}_workers_over_alone": seconds / sum(pieces)
                for n, seconds in simulated.items()
            },
        },
    }


def makespan(seconds: Sequence[float], workers: int) -> float:
    """When the last piece is ready, if a free worker takes the longest that is left."""
    free = [0.0] * workers
    for each in sorted(seconds, reverse=True):
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def _row(kind: str, workers: int, compile_s: float, ready_s: float | None) -> dict[str, Any]:
    return {"kind": kind, "workers": workers, "compile_s": compile_s, "ready_s": ready_s}


def _start(layers: int, workers: int) -> dict[str, Any]:
    """One cold start in its own process."""
    command = [sys.executable, "-m", "benchmarks.scaling", str(layers), str(workers)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, folder],
            cwd=Path(__file__).parent.parent,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _once(layers: int, workers: int, folder: Path) -> dict[str, Any]:
    """The seconds of each piece, of all together and until the model is ready."""
    from piecegraph import Config, Events, prepare
    from piecegraph.compile.backends import workers as pool

    pool.number_of_workers = lambda device, serving: workers
    model, settings = _reference(layers)
    events = Events()
    config = Config(**settings, level=3, codegen={"sizes": SIZES}, cache_dir=folder)
    prepare(model, config, events=events).close()
    spans = {span.name: span for span in events.spans}
    return {
        "pieces": [span.seconds for span in events.spans if span.name == "compile.piece"],
        "by_workers": sum(span.facts.get("by") == "worker" for span in events.spans),
        "compile": spans["compile"].seconds,
        "ready": spans["prepare"].seconds,
    }


if __name__ == "__main__":
    print(json.dumps(_once(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
