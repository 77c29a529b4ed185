"""Splitting the graph beside splitting Inductor's code, of a decoder with random weights.

Each layer writes its key and value to a cache by one op and attends by another. Starts alternate,
each with a cache of its own, and so do steps. A step's kernels and new buffers are counted while
it runs without a graph. Time is CPU time, of a start with that of the C++ compilers it runs.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecegraph import Batch, Config, GraphMode, PreparedModel, prepare

from .timing import LIBRARY, interleaved

HIDDEN, SLOTS, MAX_TOKENS, CAPTURED = 64, 256, 64, 4
WAYS = ("graph", "inductor")

LIBRARY.define("keep(Tensor key, Tensor value, Tensor(a!) cache, Tensor slots) -> Tensor")
LIBRARY.define("attend(Tensor query, Tensor cache, Tensor kept) -> Tensor")


def _keep(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    cache[0].index_copy_(0, slots, key)
    cache[1].index_copy_(0, slots, value)
    return key.new_empty(0)


def _attend(query: Tensor, cache: Tensor, kept: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query[None], cache[None, 0], cache[None, 1])[0]


LIBRARY.impl("keep", _keep, "CPU")
LIBRARY.impl("attend", _attend, "CPU")
for _name, _fake in {
    "keep": lambda key, *_: key.new_empty(0),
    "attend": lambda query, *_: torch.empty_like(query),
}.items():
    torch.library.register_fake(f"piecegraph_bench::{_name}", _fake, lib=LIBRARY)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.register_buffer("cache", torch.zeros(2, SLOTS, HIDDEN))

    def forward(self, x: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.qkv(F.rms_norm(x, (HIDDEN,))).chunk(3, -1)
        query, key = (each * cos + _turned(each) * sin for each in (query, key))
        kept = torch.ops.piecegraph_bench.keep(key, value, self.cache, slots)
        x = x + self.output(torch.ops.piecegraph_bench.attend(query, self.cache, kept))
        gate, up = self.gate_up(F.rms_norm(x, (HIDDEN,))).chunk(2, -1)
        down: Tensor = self.down(F.silu(gate) * up)
        return x + down


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.requires_grad_(False)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        angles = slots[:, None] / 10.0 ** torch.arange(HIDDEN, device=x.device)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, slots, cos, sin)
        return x


def run(quick: bool) -> dict[str, Any]:
    """For numbers of layers and both ways: starts in CPU seconds, what a layer of a step does, and
    steps in microseconds; of what was measured in turn the ratios."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows, ratios = list[dict[str, Any]](), dict[str, float]()
    try:
        _start(Decoder(1), WAYS[1]).prepared.close()  # imports, and headers of the C++ compiler
        for layers in (2,) if quick else (2, 8, 32):
            times = _add_rows(rows, layers, rounds=1 if quick else 3)
            for what, (split, cut) in times.items():
                pairs = zip(cut, split, strict=True)
                ratios[f"{what}, {layers} layers"] = median(one / two for one, two in pairs)
    finally:
        torch.set_num_threads(threads)
    note = "starts in s of CPU time, steps in us, other figures for one layer of a step"
    return {"rows": rows, "ratios": ratios, "note": note}


def _add_rows(
    rows: list[dict[str, Any]], layers: int, rounds: int
) -> dict[str, list[tuple[float, ...]]]:
    """Measure both ways, and add a row for each; returns times by what was measured."""
    model = Decoder(layers)
    starts = [[_start(model, way) for way in WAYS] for _ in range(rounds)]
    last = [each.prepared for each in starts[-1]]
    x, slots = torch.randn(MAX_TOKENS, HIDDEN), torch.arange(MAX_TOKENS)
    steps = {
        size: [partial(each.run, each.dispatch(Batch(size, 1)), x[:size], slots[:size])
               for each in last]
        for size in (MAX_TOKENS, CAPTURED)
    }  # fmt: skip
    none, piecewise = (interleaved(each, 5 * rounds, 30) for each in steps.values())
    times = {
        "cold": [*zip(*([each.cold for each in pair] for pair in starts), strict=True)],
        "warm": [*zip(*([each.warm for each in pair] for pair in starts), strict=True)],
        "NONE": none,
        "PIECEWISE": piecewise,
    }
    for number, way in enumerate(WAYS):
        recording = last[number].recordings()[0][1]
        rows.append(
            {"split": f"{way}, {layers} layers"}
            | {what: median(each[number]) for what, each in times.items()}
            | {what: n / layers for what, n in _work(steps[MAX_TOKENS][number]).items()}
            | {"segments": len(recording.segments) / layers}
        )
    for pair in starts:
        for each in pair:
            each.prepared.close()
    return times


@dataclass(frozen=True)
class _Start:
    """A model after a warm start, and CPU seconds of the cold and of the warm start."""

    prepared: PreparedModel
    cold: float
    warm: float


def _start(model: nn.Module, way: str) -> _Start:
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
        config = Config(
            splitting_ops=("piecegraph_bench::keep", "piecegraph_bench::attend"),
            inputs={"x": f"float32[num_tokens, {HIDDEN}]", "slots": "int64[num_tokens]"},
            max_num_tokens=MAX_TOKENS,
            capture_sizes=(CAPTURED,),
            graph_mode=GraphMode.PIECEWISE,
            cache_dir=Path(folder),
            cache={"verify_bundle": "off"},
            codegen={"partition": way},
        )
        began = _cpu_seconds()
        prepare(model, config).close()
        compiled = _cpu_seconds()
        prepared = prepare(model, config)
        loaded = _cpu_seconds()
        assert prepared.report()["cache"]["hit"]
        prepared.capture()
        return _Start(prepared, compiled - began, loaded - compiled)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


_WORK = {
    "kernels": ("kernel",),
    "products": ("mm", "addmm"),
    "buffers": ("_empty_strided_cpu",),
    "views": ("_reinterpret_tensor",),
}
"""What is counted, and the native functions of generated code that do it."""


def _work(step: Callable[[], Any]) -> dict[str, int]:
    """How often a step calls the functions of `_WORK`."""
    calls: Counter[str] = Counter()

    def saw(frame: Any, event: str, function: Any) -> None:
        if event == "c_call":
            calls[function.__name__] += 1

    sys.setprofile(saw)
    try:
        step()
    finally:
        sys.setprofile(None)
    return {what: sum(calls[name] for name in names) for what, names in _WORK.items()}
