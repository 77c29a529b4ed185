"""Starts in a separate process: `start_once.py CACHE '{"layers": 4, …}' …` prints a JSON list.

Each argument after CACHE is one start. `ahead` builds libraries afterwards; `rank` is (rank, size,
rendezvous file) of a start among several; `version` is that of the library, and `skew` the seconds
by which the clock is wrong; other options are settings of `Config`. With `bundle="serve"` steps run
until compiled code serves, with "serve_ahead" until there are libraries.
"""

from piecegraph.tests.quick_imports import end, imported

# isort: split
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path

import torch
from small_model import Small

from piecegraph import Batch, Config, Events, PiecegraphError, compile_ahead, prepare
from piecegraph.runtime.parts.ranks.ranks import Ranks

imported()
SIZES = (1, 3, 17, 64)

real = importlib.metadata.version


def start(cache, options):
    ahead, layers = options.pop("ahead", False), options.pop("layers")
    ranks = _joined(*options.pop("rank")) if "rank" in options else None
    if (version := options.pop("version", None)) is not None:
        importlib.metadata.version = lambda name: version if name == "piecegraph" else real(name)
    if skew := options.pop("skew", 0):
        time.time = lambda now=time.time: now() + skew
    model = Small(layers).eval()
    settings = {
        "inputs": {"x": "float32[num_tokens, 16]"},
        "splitting_ops": ("piecegraph_fleet::mix",),
        "max_num_tokens": 64,
        "graph_mode": "NONE",
        "cache_dir": Path(cache),
        **options,
    }
    events = Events()
    try:
        prepared = prepare(model, Config(**settings), events=events, ranks=ranks)
    except PiecegraphError as error:
        return {"error": type(error).__name__, "message": str(error)}
    loaded = [
        name for name in ("torch._dynamo", "torch._inductor", "networkx") if name in sys.modules
    ]
    facts = events.named("bundle")[-1].facts
    hit = prepared.compiled.from_bundle
    uncompiled = 0.0
    ends_with = "libraries" if options.get("bundle") == "serve_ahead" else "switch"
    while (beside := prepared.report()["background"]) and not (
        beside["failures"] or beside[ends_with]
    ):
        uncompiled = max(uncompiled, *(_difference(prepared, model, size) for size in SIZES))
        time.sleep(0.02)  # leaves time for the child
    if ahead:
        compile_ahead(model, Config(**settings))
    return {
        "hit": hit,
        "torch": os.path.dirname(torch.__file__),
        "background": prepared.report()["background"],
        "error_of_uncompiled": uncompiled,
        "reason": f"{facts.get('reason')} {facts.get('detail', '')}",
        "compilers_loaded": loaded,
        "error_of_results": max(_difference(prepared, model, size) for size in SIZES),
        "counters": dict(events.counters),
        "variables": {n: v for n, v in os.environ.items() if n.endswith("CACHE_DIR")},
    }


def _joined(rank, size, meeting):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size
    )
    return Ranks(timeout_s=60)


def _difference(prepared, model, size):
    x = torch.randn(size, 16)
    return float((prepared(x, batch=Batch(size, size)) - model(x)).abs().max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([start(sys.argv[1], json.loads(options)) for options in sys.argv[2:]]))
    end()
