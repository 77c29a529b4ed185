"""What steps ask the CUDA runtime for, in torch's own code, as lines of tables.md:
`PIECEGRAPH_OFF=proof python tests/cuda_stand_in/run.py -m tests.cuda_stand_in.call_table`.

Kernels are launched and compute nothing: tokens are arbitrary. Only calls of drafts depend on
them: there all tokens are 0. Proofs would notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

import piecegraph as pg
from piecegraph.compile.plan import result_forms
from piecegraph.runtime.core.preserved import SavedMemory
from tests.tools.conftest import ONE_LAYER, started

from . import models
from .control import StandIn

CALLS = {
    "graph launches": ("cudaGraphLaunch",),
    "kernels": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "memcpys": ("cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemcpy"),
    "of pageable memory": ("pageable",),
    "memsets": ("cudaMemsetAsync", "cuMemsetD32Async"),
    "events": ("cudaEventRecord", "cudaEventRecordWithFlags"),
    "waits for events": ("cudaEventSynchronize",),
    "for streams": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize"),
    "allocations": ("cudaMalloc", "cudaHostAlloc", "cudaMallocHost", "cudaFree", "cudaFreeHost"),
}
"""Columns, and the calls that each counts."""
WAITS = ("of pageable memory", "for streams")
"""Of which no started step makes any."""
SIZES = {"ids": torch.int64, "positions": torch.int64, "slots": torch.int32, "rows": torch.int32}
ENGINES: dict[str, dict[str, Any]] = {
    "FULL, decode": {"mode": "full-decode-only"},
    "PIECEWISE, 2 layers": {"mode": "piecewise", "model": f"{ONE_LAYER},layers=2"},
    "FULL, the attention kernel": {"mode": "full", "attention": "triton"},
    "FULL, temperature": {"mode": "full-decode-only", "temperature": "0.7"},
    "FULL, LoRA": {"mode": "full-decode-only", "lora": 2},
    "FULL, drafts": {"mode": "full-decode-only", "speculate": 2},
    "FULL, DELAYED": {"mode": "full-decode-only", "strategy": "delayed"},
    "FULL, defragmentation": {"mode": "full-decode-only", "defragment": 0},
    "buckets": dict.fromkeys(("mode", "capture_sizes", "attention")) | {"buckets": "exponential"},
    "NONE": {"mode": "none"},
}


class FourInputs(models.Model):
    """A model of four integer inputs, of two types."""

    def forward(self, ids: Any, positions: Any, slots: Any, rows: Any) -> torch.Tensor:
        x = (ids + positions + slots + rows).float()[:, None].expand(-1, 8)
        return super().forward(x)


def counted(run: Callable[[], object]) -> tuple[int, ...]:
    """How many calls of each column `run` makes."""
    stand_in = StandIn()

    def now() -> list[int]:
        return [sum(map(stand_in.calls, calls)) for calls in CALLS.values()]

    before = now()
    run()
    return tuple(after - one for one, after in zip(before, now(), strict=True))


def library_steps() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Steps of four copied inputs, of four of the engine's buffers, and with padding."""
    inputs = {name: torch.zeros(8, dtype=dtype, device="cuda") for name, dtype in SIZES.items()}
    for mode in ("FULL", "PIECEWISE", "NONE"):
        for name, buffers in (("4 copied inputs", None), ("4 buffers", inputs)):
            if buffers and mode != "FULL":
                continue
            model = models.prepared(
                model=FourInputs(8), given={"input_buffers": buffers},
                inputs={k: f"{str(d)[6:]}[num_tokens]" for k, d in SIZES.items()},
                max_num_tokens=8, capture_sizes=(8,), graph_mode=mode, cache=False,
            )  # fmt: skip
            model.capture(lambda descriptor, mode: None)

            def step(rows: int, model: pg.PreparedModel = model) -> tuple[int, ...]:
                real = {name: tensor[:rows] for name, tensor in inputs.items()}
                return counted(lambda: model(**real, batch=models.batch(rows), metadata=None))

            step(8)
            yield f"{mode}, {name}", step(8)
            yield f"{mode}, {name}, padding written", step(5)
            model.close()


def engine_steps(overlap: bool, **options: Any) -> list[tuple[int, ...]]:
    """Each step of the reference engine, without the first ones."""
    given = {
        "attention": "plain", "requests": 8, "length_scale": 0.05, "device": "cuda",
        "capture_sizes": "1,2,4,8,12", "overlap": overlap, **options,
    }  # fmt: skip
    with started(**given) as served:
        steps, engine = [], served.service.engine
        run = engine.step

        def step() -> Any:
            completed = []
            steps.append(counted(lambda: completed.append(run())))
            return completed[0]

        engine.step = step
        if (scheduler := engine.scheduler).drafter is not None:
            finish = scheduler.finish
            scheduler.finish = lambda schedule, tokens: finish(schedule, [0] * len(tokens))
        served.serve()
    return steps[8:-2]


def table() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each kind of step and its counts. Of an engine: the most frequent counts of those steps that
    have most graphs, and of WAITS the largest of any step."""
    yield from library_steps()
    for name, options in ENGINES.items():
        for overlap in (False,) if "buckets" in options else (False, True):
            steps = engine_steps(overlap, **options)
            graphs = max(step[0] for step in steps)
            alike = Counter(step for step in steps if step[0] == graphs)
            largest = map(max, zip(*steps, strict=True))
            counts = zip(CALLS, alike.most_common(1)[0][0], largest, strict=True)
            counts = tuple(most if title in WAITS else usual for title, usual, most in counts)
            yield f"engine, {name}{', overlap' if overlap else ''}", counts


if __name__ == "__main__":
    torch.cuda.init()
    # nothing compares values: those of the KV cache and of arguments are arbitrary, too
    SavedMemory.changed = lambda self, now: [torch.zeros(1)] * len(self.values())
    result_forms._MOST_BYTES = 0
    version = torch.__version__.partition("+")[0]
    for title, counts in table():
        print("|", *(f"{cell} |" for cell in (version, title, *counts)), flush=True)
