"""What only a device can show, one measurement per function: the parts of `benchmarks.first_hour`.

`python -m benchmarks.on_device NAME [--small]` prints one JSON object. `--small` is for the
stand-in for CUDA, which computes such sizes in seconds; its numbers say nothing about a device.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import piecegraph as pg
from piecegraph.runtime.core.records import CaptureFailure

from .timing import LIBRARY

CUDA = torch.device("cuda")

LIBRARY.define("on_device(Tensor x, Tensor(a!) output, str layer_name) -> ()")


def _halve(x: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    output.copy_(x * 0.5)


LIBRARY.impl("on_device", _halve, "CUDA")

LIBRARY.define("all_reduce(Tensor(a!) x) -> ()")
LIBRARY.impl("all_reduce", lambda x: dist.all_reduce(x) and None, "CUDA")
torch.library.register_fake("piecegraph_bench::all_reduce", lambda x: None, lib=LIBRARY)
torch.library.register_fake(
    "piecegraph_bench::on_device", lambda x, output, name: None, lib=LIBRARY
)


@dataclass(frozen=True)
class Scale:
    """The model that is measured: weights of `layers` x 2 x hidden x hidden."""

    layers: int
    hidden: int
    max_num_tokens: int
    num_sizes: int
    rounds: int

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """1, 2, 4 and multiples of 8: the sizes that engines capture by default."""
        return (1, 2, 4, *(8 * i for i in range(1, self.num_sizes - 2)))


DEVICE = Scale(layers=32, hidden=4096, max_num_tokens=8192, num_sizes=67, rounds=50)
SMALL = Scale(layers=4, hidden=64, max_num_tokens=64, num_sizes=7, rounds=3)


class Layers(torch.nn.Module):
    """Two linear layers around a splitting op, `scale.layers` times. With `reduces`, ranks add up
    what the second one gives."""

    def __init__(self, scale: Scale, num_splits: int | None = None, reduces: bool = False) -> None:
        super().__init__()
        self.reduces = reduces
        self.num_splits = scale.layers if num_splits is None else num_splits
        torch.manual_seed(0)
        sides = (2 * scale.layers, scale.hidden, scale.hidden)
        bound = scale.hidden**-0.5
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(*sides[1:], device=CUDA).uniform_(-bound, bound))
            for _ in range(sides[0])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (before, after) in enumerate(
            zip(self.weights[::2], self.weights[1::2], strict=True)
        ):
            middle = torch.nn.functional.silu(x @ before)
            if i < self.num_splits:
                output = torch.empty_like(middle)
                torch.ops.piecegraph_bench.on_device(middle, output, str(i))
                middle = output
            part = middle @ after
            if self.reduces:
                torch.ops.piecegraph_bench.all_reduce(part)
            x = x + part
        return x


def prepared(
    scale: Scale,
    num_splits: int | None = None,
    *,
    model: Layers | None = None,
    ranks: pg.Ranks | None = None,
    **settings: Any,
) -> pg.PreparedModel:
    """`Layers`, prepared without Inductor, so that what is measured is not its code."""
    config = pg.Config(
        splitting_ops=() if num_splits == 0 else ("piecegraph_bench::on_device",),
        inputs={"x": f"float32[num_tokens, {scale.hidden}]"},
        max_num_tokens=scale.max_num_tokens,
        max_num_reqs=max(scale.capture_sizes),
        capture_sizes=scale.capture_sizes,
        compiler="eager",
        cache=False,
        graph_mode="FULL",
        attention={"support": "ALWAYS"},
    )
    layers = {str(i): None for i in range(scale.layers)}
    model = model or Layers(scale, num_splits)
    return pg.prepare(model, config.changed(**settings), layers=layers, ranks=ranks)


def captured(scale: Scale, num_splits: int | None = None, **settings: Any) -> pg.PreparedModel:
    """`prepared`, with its graphs. A capture that fails ends the measurement."""
    return capture(prepared(scale, num_splits, **settings))


def capture(model: pg.PreparedModel) -> pg.PreparedModel:
    model.capture(no_metadata)
    failures = model.records.of(CaptureFailure)
    if failures:
        raise SystemExit(f"{len(failures)} captures failed: {failures[0].reason}")
    return model


def no_metadata(*_: Any) -> None:
    return None


def decode(num_tokens: int) -> pg.Batch:
    return pg.Batch(num_tokens=num_tokens, num_reqs=num_tokens, is_decode=True, query_len=1)


def used() -> dict[str, int]:
    """Bytes of the device, as torch's allocator and as the driver count them, without what torch
    has cached: a capture session gives that back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {"allocator": torch.cuda.memory_reserved(), "driver": total - free}


def graph_bytes(scale: Scale) -> dict[str, Any]:
    """What graphs take: growth of both readings during the captures, and what the model states."""
    model = prepared(scale)
    before = used()
    capture(model)
    after = used()
    captures = model.report()["captures"]
    return {
        "graphs": len(captures),
        "allocator_bytes": after["allocator"] - before["allocator"],
        "driver_bytes": after["driver"] - before["driver"],
        "stated_bytes": sum(each["bytes"] for each in captures),
        "largest": max(captures, key=lambda each: each["bytes"]),
        "capture_seconds": sum(each["ms"] for each in captures) / 1000,
        "executables": model.report()["executables"],
    }


def plan_and_largest_step(scale: Scale) -> dict[str, Any]:
    """Follow `memory_plan(0.9)`: a KV cache of its size, all captures, the largest step."""
    model = prepared(scale)
    plan = model.parts.strategies.memory_plan(0.9, no_metadata)
    cache = torch.empty(plan.kv_cache, dtype=torch.uint8, device=CUDA)
    capture(model)
    x = torch.randn(scale.max_num_tokens, scale.hidden, device=CUDA)
    model(x, batch=pg.Batch(num_tokens=scale.max_num_tokens, num_reqs=1))
    left = torch.cuda.mem_get_info()[0]
    return {
        "kv_cache_bytes": cache.numel(),
        "planned_graph_bytes": plan.graphs,
        "graphs": len(model.recordings()),
        "free_bytes_after_the_largest_step": left,
    }


def captured_decode(scale: Scale) -> dict[str, Any]:
    """A captured decode step equals the model: also the program that compute-sanitizer runs."""
    model = captured(scale, capture_sizes=scale.capture_sizes[:4])
    plain = Layers(scale)
    worst = 0.0
    for num_tokens in (1, 3, scale.capture_sizes[3]):
        x = torch.randn(num_tokens, scale.hidden, device=CUDA)
        with torch.no_grad():
            worst = max(worst, (model(x, batch=decode(num_tokens)) - plain(x)).abs().max().item())
    if not worst < 1e-3:
        raise SystemExit(f"a captured step differs by {worst}")
    return {"largest_difference": worst}


def engine_graph_beside_ours(scale: Scale) -> dict[str, Any]:
    """An engine warms up and captures on its stream, then we capture; both graphs stay right."""
    plain = Layers(scale)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    x, graph = torch.randn(4, scale.hidden, device=CUDA), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        plain(x)
        with torch.cuda.graph(graph, stream=stream):
            theirs = plain(x)
    torch.cuda.synchronize()
    model = captured(scale)
    worst = 0.0
    for _ in range(scale.rounds):
        x.normal_()
        with torch.no_grad():
            expected = plain(x)
            ours = model(x, batch=decode(4))
        graph.replay()
        torch.cuda.synchronize()
        worst = max(worst, *((each - expected).abs().max().item() for each in (ours, theirs)))
    if not worst < 1e-3:
        raise SystemExit(f"a graph beside ours differs by {worst}")
    return {"rounds": scale.rounds, "largest_difference": worst}


def two_ranks(scale: Scale) -> dict[str, Any]:
    """Tensor parallelism: collectives in pieces and in FULL graphs equal those of the model."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(dist.get_rank())  # each rank has other weights, and the same inputs
    model, worst = Layers(scale, reduces=True), {}
    for mode in ("PIECEWISE", "FULL"):
        sizes = scale.capture_sizes[:4]
        step = prepared(scale, model=model, ranks=pg.Ranks(), graph_mode=mode, capture_sizes=sizes)
        capture(step)
        worst[mode] = 0.0
        for num_tokens in (1, 3, sizes[3]):
            generator = torch.Generator(CUDA).manual_seed(num_tokens)
            x = torch.randn(num_tokens, scale.hidden, device=CUDA, generator=generator)
            with torch.no_grad():
                difference = step(x, batch=decode(num_tokens)) - model(x)
            worst[mode] = max(worst[mode], difference.abs().max().item())
        if not worst[mode] < 1e-3:
            raise SystemExit(f"a captured {mode} step differs by {worst[mode]}")
        step.close()
    dist.destroy_process_group()
    return {f"{mode}_largest_difference": difference for mode, difference in worst.items()}


def step_cost(scale: Scale) -> dict[str, Any]:
    """A FULL step beside a graph captured by hand and `torch.compile(mode="reduce-overhead")`."""
    num_tokens = scale.capture_sizes[-1]
    model, plain = captured(scale), Layers(scale)
    x = torch.randn(num_tokens, scale.hidden, device=CUDA)
    fixed, graph = x.clone(), torch.cuda.CUDAGraph()
    reduced = torch.compile(Layers(scale, num_splits=0), mode="reduce-overhead")
    unsplit = captured(scale, num_splits=0)
    with torch.no_grad():
        plain(fixed)
        with torch.cuda.graph(graph):
            plain(fixed)
        for _ in range(3):
            reduced(x)
        batch = decode(num_tokens)

        def by_hand() -> None:
            fixed.copy_(x)
            graph.replay()

        times = in_turn(
            {
                "by_hand": by_hand,
                "full_step": lambda: model(x, batch=batch),
                "reduce_overhead": lambda: reduced(x),
                "full_step_unsplit": lambda: unsplit(x, batch=batch),
            },
            scale.rounds,
        )
    return {
        **times,
        "full_step_over_by_hand": ratio(times, "full_step", "by_hand"),
        "full_step_over_reduce_overhead": ratio(times, "full_step_unsplit", "reduce_overhead"),
    }


def segments(scale: Scale) -> dict[str, Any]:
    """A PIECEWISE step of 1, 17 and 65 segments beside the bare replays of the same graphs."""
    x = torch.randn(8, scale.hidden, device=CUDA)
    batch = pg.Batch(num_tokens=8, num_reqs=1)
    result: dict[str, Any] = {}
    for num_splits in (0, 8, 32):
        mode = "PIECEWISE" if num_splits else "FULL"
        model = captured(replace(scale, layers=32), num_splits, graph_mode=mode, capture_sizes=(8,))
        ((_, recording),) = model.recordings()
        step = partial(model, x, batch=batch)
        times = in_turn({"step": step, "replay": recording.replay}, scale.rounds)
        count = len(recording.segments)
        result[f"{count}_segments_over_replay"] = ratio(times, "step", "replay")
        result |= {f"{count}_segments_{name}": us for name, us in times.items()}
        model.close()
    return result


def lazy_under_load(scale: Scale) -> dict[str, Any]:
    """Steps under LAZY: milliseconds of the device, those during which a capture ran apart."""
    model = captured(scale, strategy="lazy")
    plain: list[float] = []
    capturing: list[float] = []
    for step in range(4 * scale.rounds):
        num_tokens = scale.capture_sizes[step % len(scale.capture_sizes)]
        x = torch.randn(num_tokens, scale.hidden, device=CUDA)
        before = len(model.report()["captures"])
        begin, end = timed_event(), timed_event()
        begin.record()
        model(x, batch=decode(num_tokens))
        end.record()
        end.synchronize()
        grew = len(model.report()["captures"]) > before
        (capturing if grew else plain).append(begin.elapsed_time(end))
    return {
        "steps": len(plain),
        "steps_with_a_capture": len(capturing),
        "step_ms": median(plain),
        "step_with_a_capture_ms": median(capturing) if capturing else None,
        "worst_ms": max(plain + capturing),
    }


def executable_update(scale: Scale) -> dict[str, Any]:
    """Microseconds to turn one executable graph into that of another size, by cuGraphExecUpdate."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return {"skipped": "cuda-bindings is not installed"}
    plain, pool = Layers(scale, num_splits=0), torch.cuda.graph_pool_handle()
    graphs = []
    with torch.no_grad():
        for num_tokens in scale.capture_sizes[-2:]:
            x = torch.randn(num_tokens, scale.hidden, device=CUDA)
            plain(x)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph, pool=pool):
                plain(x)
            graphs.append(graph)
    graphs[0].instantiate()
    executable = driver.CUgraphExec(graphs[0].raw_cuda_graph_exec())
    torch.cuda.synchronize()
    refusals = []

    def switch(graph: Any) -> None:
        status, _ = driver.cuGraphExecUpdate(executable, driver.CUgraph(graph.raw_cuda_graph()))
        if int(status):
            refusals.append(int(status))

    names = {f"to_graph_{i}": partial(switch, graph) for i, graph in enumerate(graphs)}
    times = in_turn(names, scale.rounds)
    return {**times, "refused": sorted(set(refusals))}


def timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def in_turn(fns: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Microseconds per call on the device, medians of calls that take turns."""
    times: dict[str, list[float]] = {name: [] for name in fns}
    with torch.no_grad():
        for fn in fns.values():
            fn()
        for _ in range(rounds):
            for name, fn in fns.items():
                begin, end = timed_event(), timed_event()
                torch.cuda.synchronize()
                begin.record()
                fn()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) * 1000)
    return {f"{name}_us": median(each) for name, each in times.items()}


def ratio(times: dict[str, float], one: str, other: str) -> float | None:
    below = times[f"{other}_us"]
    return times[f"{one}_us"] / below if below else None


MEASUREMENTS = {
    each.__name__: each
    for each in (
        captured_decode, graph_bytes, plan_and_largest_step, engine_graph_beside_ours, two_ranks,
        step_cost, segments, lazy_under_load, executable_update,
    )
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    result = MEASUREMENTS[options.name](SMALL if options.small else DEVICE)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
