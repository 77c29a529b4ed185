"""What does a step cost when its kernels are free?

A model of splitting calls that do nothing, its graphs replaced by ones that do nothing: what is
left of a step is the library's work. Beside it, in turn, the floor: a bare loop over the same
callables, without dispatch, without input copies and without results. No GPU takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ... import Batch, Config, GraphMode, PreparedModel, RuntimeMode, prepare
from ._idle_graphs import IdleBackend

NUM_TOKENS = 4

LIBRARY: Any = torch.library.Library("piecegraph_bench", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("idle(Tensor x, Tensor(a!) output, str layer_name) -> ()")


def _idle(x: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    pass


LIBRARY.impl("idle", _idle, "CPU")
torch.library.register_fake("piecegraph_bench::idle", _idle, lib=LIBRARY)


class Idle(torch.nn.Module):
    """`layers` splitting calls with one addition before each and one after the last."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer_names = [f"layers.{i}" for i in range(layers)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer_name in self.layer_names:
            x = x + 1
            output = torch.empty_like(x)
            torch.ops.piecegraph_bench.idle(x, output, layer_name)
            x = output
        return x + 1


def run(quick: bool) -> dict[str, Any]:
    """Rows in microseconds a step; ratios `{mode}_step_over_bare_loop`, medians of paired runs."""
    layers, pairs, steps = (8, 5, 200) if quick else (32, 15, 1000)
    rows, ratios = [], {}
    for mode in (GraphMode.PIECEWISE, GraphMode.FULL_DECODE_ONLY):
        prepared = _prepared(layers, mode)
        try:
            step, loop = _step(prepared), _bare_loop(prepared)
            measured = [(_time(step, steps), _time(loop, steps)) for _ in range(pairs)]
        finally:
            prepared.close()
        name = "piecewise" if mode is GraphMode.PIECEWISE else "full"
        ratios[f"{name}_step_over_bare_loop"] = median(ours / bare for ours, bare in measured)
        rows.append(
            {
                "mode": name.upper(),
                "layers": layers,
                "step_us": median(ours for ours, _ in measured) * 1e6,
                "bare_loop_us": median(bare for _, bare in measured) * 1e6,
                "own_us": median(ours - bare for ours, bare in measured) * 1e6,
            }
        )
    return {"ratios": ratios, "rows": rows}


def _prepared(layers: int, mode: GraphMode) -> PreparedModel:
    config = Config(
        splitting_ops=("piecegraph_bench::idle",),
        inputs={"x": "float32[num_tokens, 8]"},
        max_num_tokens=NUM_TOKENS,
        max_num_reqs=NUM_TOKENS,
        capture_sizes=(NUM_TOKENS,),
        graph_mode=mode,
        compiler="eager",
        cache=False,
    )
    prepared = prepare(Idle(layers), config, backend=IdleBackend())
    prepared.capture()
    prepared.seal()
    return prepared


def _step(prepared: PreparedModel) -> Callable[[], Any]:
    """One step as an engine takes it, through dispatch."""
    batch = Batch(num_tokens=NUM_TOKENS, num_reqs=NUM_TOKENS, is_decode=True, query_len=1)
    x = torch.zeros(NUM_TOKENS, 8)
    assert prepared.dispatch(batch).mode is not RuntimeMode.NONE
    return lambda: prepared.run(prepared.dispatch(batch), x)


def _bare_loop(prepared: PreparedModel) -> Callable[[], Any]:
    ((_, recording),) = prepared.recordings()
    calls = recording.calls

    def loop() -> None:
        for call in calls:
            call()

    return loop


def _time(fn: Callable[[], Any], times: int) -> float:
    """Seconds a call, the mean of `times` calls in a row."""
    began = time.perf_counter()
    for _ in range(times):
        fn()
    return (time.perf_counter() - began) / times
