"""One of two ranks whose model sums over both: `rank_scene.py RANK FOLDER MODE [MEMORY_LIMIT]`.

The collective is a host function on the stream that waits for the other rank's part, so a rank that
runs one more than the other waits for nothing. As custom all-reduce does, it needs memory that the
engine registers after all captures. Rank 1 cannot capture 8 tokens; with a limit, not probe 4.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import piecegraph as pg
from tests.cuda_stand_in import values
from tests.cuda_stand_in.models import batch, prepared
from tests.ops import define

RANK, FOLDER, MODE = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
MEMORY_LIMIT = int(sys.argv[4]) if sys.argv[4:] else None
CANNOT_CAPTURE = 8 if MEMORY_LIMIT is None else 4
DEADLINE_S = 60.0
COUNT = itertools.count()
REGISTERED: list[bool] = []
OPS = torch.library.Library("standin_ranks", "DEF")


def exchange(part: torch.Tensor) -> torch.Tensor:
    """The other rank's part of the same collective."""
    number = next(COUNT)
    torch.save(part, FOLDER / f"{number}-{RANK}.tmp")
    (FOLDER / f"{number}-{RANK}.tmp").rename(FOLDER / f"{number}-{RANK}")
    other, began = FOLDER / f"{number}-{1 - RANK}", time.monotonic()
    while not other.exists():
        if time.monotonic() - began > DEADLINE_S:
            raise TimeoutError(f"collective {number}: the other rank runs none")
        time.sleep(0.002)
    return torch.load(other)


def all_reduce(x: torch.Tensor) -> None:
    captured = torch.cuda.is_current_stream_capturing()
    if captured and RANK == 1 and len(x) == CANNOT_CAPTURE:
        raise RuntimeError("rank 1 has no memory for this capture")
    place = values.Address(x)

    def body() -> None:
        if captured and not REGISTERED:
            raise RuntimeError("a captured collective ran before its memory was registered")
        place.on_cpu().add_(exchange(place.on_cpu().clone()))

    values.on_stream("all_reduce", body)


define(OPS, "all_reduce(Tensor(a!) x) -> ()", all_reduce, key="CUDA")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, output = x * 2, torch.empty_like(x)
        torch.ops.standin_ranks.all_reduce(query)
        torch.ops.standin.attention(query, output, "layer 0")
        return output + self.one


def main() -> None:
    library = values.install()
    store = dist.FileStore(str(FOLDER / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
    model = prepared(
        hidden=64, model=Model(), given={"ranks": pg.Ranks(timeout_s=DEADLINE_S)},
        max_num_tokens=16, graph_mode=MODE, capture_sizes=(4, 8, 16),
        steps={"memory_limit": MEMORY_LIMIT},
    )  # fmt: skip
    model.capture(lambda descriptor, mode: None)
    REGISTERED.append(True)
    results = []
    for num_tokens in (3, 8, 16, 6):
        x = torch.full((num_tokens, 64), RANK + 1.0, device="cuda")
        results.append(model(x, batch=batch(num_tokens), metadata=None).unique().tolist())
    names = [recording.name for _, recording in model.recordings()]
    errors = [f"{type(error).__name__}: {error}" for error in values.errors]
    failures = [event.facts["reason"] for event in model.events.named("capture.failed")]
    told = {"graphs": names, "results": results, "errors": errors, "failures": failures}
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(told))
    del library


main()
