"""What only a device can show, one measurement per function: steps of `benchmarks.first_hour`.

`python -m benchmarks.on_device NAME [--small]` prints one JSON object, and fails if a number is
outside of its limit in `device.toml`. `--small` is for the stand-in for CUDA, which computes such
sizes in seconds: limits of times are not applied there, those of values, bytes and counts are.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel

import piecegraph as pg
from piecegraph.runtime.backends import cuda as backend
from piecegraph.runtime.core.records import CaptureFailure
from piecegraph.tools.engine import attention as _registers  # noqa: F401
from piecegraph.tools.engine.block_manager import BlockManager
from piecegraph.tools.engine.kv_cache import LayerCache
from piecegraph.tools.engine.metadata import MetadataBuffers
from piecegraph.tools.engine.scheduler import Request, Share, StepSchedule
from piecegraph.tools.serve import run as main_job
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.requests import read_requests

from .first_hour import DEVICE as STATED
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
    small: bool = False

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """1, 2, 4 and multiples of 8: the sizes that engines capture by default."""
        return (1, 2, 4, *(8 * i for i in range(1, self.num_sizes - 2)))


DEVICE = Scale(layers=32, hidden=4096, max_num_tokens=8192, num_sizes=67, rounds=50)
SMALL = Scale(layers=4, hidden=64, max_num_tokens=64, num_sizes=7, rounds=3, small=True)


class Layers(torch.nn.Module):
    """Two linear layers around a splitting op, `scale.layers` times. With `reduces`, ranks add up
    what the second one gives."""

    def __init__(
        self,
        scale: Scale,
        num_splits: int | None = None,
        reduces: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.reduces = reduces
        self.num_splits = scale.layers if num_splits is None else num_splits
        torch.manual_seed(0)
        sides = (2 * scale.layers, scale.hidden, scale.hidden)
        bound = scale.hidden**-0.5
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(
                torch.empty(*sides[1:], device=CUDA, dtype=dtype).uniform_(-bound, bound)
            )
            for _ in range(sides[0])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(len(self.weights) // 2):  # Dynamo of torch 2.11 traces no slice of a list
            before, after = self.weights[2 * i], self.weights[2 * i + 1]
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


class Indexed(Layers):
    """`Layers` with three inputs of integers, as positions and slots are: rows of a weight."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(x + self.weights[0][a + b + c])


def prepared(
    scale: Scale,
    num_splits: int | None = None,
    *,
    model: Layers | None = None,
    ranks: pg.Ranks | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    **settings: Any,
) -> pg.PreparedModel:
    """`Layers`, prepared without Inductor, so that what is measured is not its code."""
    model = model or Layers(scale, num_splits)
    dtype = str(model.weights[0].dtype).removeprefix("torch.")
    inputs = {"x": f"{dtype}[num_tokens, {scale.hidden}]"}
    if isinstance(model, Indexed):
        inputs |= dict.fromkeys(("a", "b", "c"), "int64[num_tokens]")
    config = pg.Config(
        splitting_ops=("piecegraph_bench::on_device",) if model.num_splits else (),
        inputs=inputs,
        max_num_tokens=scale.max_num_tokens,
        max_num_reqs=max(scale.capture_sizes),
        capture_sizes=scale.capture_sizes,
        compiler="eager",
        cache=False,
        graph_mode="FULL",
        attention={"support": "ALWAYS"},
    )
    layers = {str(i): None for i in range(scale.layers)}
    config = config.changed(**settings)
    return pg.prepare(model, config, layers=layers, ranks=ranks, input_buffers=buffers)


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
    """What graphs take: by torch's allocator and the driver, as stated, and as the plan foresaw."""
    model = prepared(scale)
    planned = model.parts.strategies.memory_plan(0.9, no_metadata).graphs
    before = used()
    capture(model)
    after = used()
    captures = model.report()["captures"]
    taken = after["driver"] - before["driver"]
    stated = sum(each["bytes"] for each in captures)
    return {
        "graphs": len(captures),
        "allocator_bytes": after["allocator"] - before["allocator"],
        "driver_bytes": taken,
        "stated_bytes": stated,
        "planned_bytes": planned,
        "largest": max(captures, key=lambda each: each["bytes"]),
        "capture_seconds": sum(each["ms"] for each in captures) / 1000,
        "failed": [
            *above("forecast_off", abs(planned - taken) / max(taken, 1)),
            *above("forecast_off", abs(stated - taken) / max(taken, 1)),
        ],
    }


def first_replay(scale: Scale) -> dict[str, Any]:
    """Bytes of the driver and time of each graph's first replay, with its upload at the capture,
    and for comparison without."""
    result: dict[str, Any] = {}
    for name in ("uploaded", "not_uploaded"):
        without = patch.object(backend, "upload", lambda graph: None)
        with nullcontext() if name == "uploaded" else without:
            model = captured(scale, graph_mode="PIECEWISE")
        before, us = used()["driver"], []
        for _, recording in model.recordings():
            us.append([seconds(recording.replay, 1, torch.cuda.synchronize)[1] * 1e6 for _ in "12"])
        result[f"{name}_bytes"] = used()["driver"] - before
        result[f"{name}_first_us"] = sum(first for first, _ in us)
        result[f"{name}_second_us"] = sum(second for _, second in us)
        model.close()
    slower = result["uploaded_first_us"] / result["uploaded_second_us"]
    failed = above("first_replay_bytes", result["uploaded_bytes"])
    return {**result, "failed": failed + above("first_over_second_replay", slower, scale)}


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
    """Captured decode steps equal the model: also what compute-sanitizer runs."""
    plain, result = Layers(scale), {}
    for mode in ("FULL", "PIECEWISE"):
        model = captured(scale, capture_sizes=scale.capture_sizes[:4], graph_mode=mode)
        worst = 0.0
        for num_tokens in (1, 3, scale.capture_sizes[3]):
            x = torch.randn(num_tokens, scale.hidden, device=CUDA)
            with torch.no_grad():
                difference = model(x, batch=decode(num_tokens)) - plain(x)
            worst = max(worst, difference.abs().max().item())
        result[f"{mode}_difference"] = worst
        model.close()
    failed = [each for worst in result.values() for each in above("difference", worst)]
    return {**result, "failed": failed}


def invalid_access(scale: Scale) -> dict[str, Any]:
    """Write far behind all memory, as a planted fault: compute-sanitizer must report it."""
    import triton
    from triton import language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def write(pointer: Any) -> None:
        tl.store(pointer + (1 << 40), 1.0)

    write[(1,)](torch.zeros(1, device=CUDA))
    torch.cuda.synchronize()
    return {}


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
    failed = above("difference", worst)
    return {"rounds": scale.rounds, "largest_difference": worst, "failed": failed}


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
        step.close()
    dist.destroy_process_group()
    failed = [each for difference in worst.values() for each in above("difference", difference)]
    return {**worst, "failed": failed}


CALLS = 20
"""Steps that are queued one after the other, as in service: what the slower of host and device
takes shows. One more of them is a cost of 5 %."""


def step_cost(scale: Scale) -> dict[str, Any]:
    """Microseconds of steps beside graphs of the same code, captured by hand, all with Inductor.

    Small steps show the host's part, large ones the device's. `planted` is the graph by hand with a
    cost of 5 %: a measurement that does not see it proves nothing.
    """
    rows, failed = [], []
    for hidden in (64,) if scale.small else (512, 4096):
        for num_tokens in (8,) if scale.small else (1, 8, 256):
            layers = 2 if scale.small else scale.layers
            sized = Scale(layers, hidden, 512, 4, scale.rounds, scale.small)
            row = _step_row(sized, num_tokens)
            rows.append({"hidden": hidden, "num_tokens": num_tokens, **row})
            failed += judged(row, scale)
    return {"rows": rows, "failed": failed}


def _step_row(scale: Scale, num_tokens: int) -> dict[str, float]:
    """One row: `<way>_us` of a step and `<way>_host_us` until it was queued, in bfloat16."""
    half: dict[str, Any] = {"dtype": torch.bfloat16}
    settings: dict[str, Any] = {"capture_sizes": (num_tokens,), "compiler": "inductor"}
    x = torch.randn(num_tokens, scale.hidden, device=CUDA, dtype=torch.bfloat16)
    indices = [torch.zeros(num_tokens, dtype=torch.int64, device=CUDA) for _ in "abc"]
    batch, tensors = decode(num_tokens), (x, *indices)
    buffers = {
        name: each.new_zeros((scale.max_num_tokens, *each.shape[1:]))
        for name, each in zip(("x", "a", "b", "c"), tensors, strict=True)
    }
    rows = [each[:num_tokens] for each in buffers.values()]
    with torch.no_grad():
        copied, in_place = (
            capture(prepared(scale, model=Indexed(scale, 0, **half), buffers=kept, **settings))
            for kept in (None, buffers)
        )
        ((_, recording),) = copied.recordings()
        fixed = list(map(torch.clone, tensors))
        reduced = torch.compile(Layers(scale, 0, **half), mode="reduce-overhead")
        unsplit = capture(prepared(scale, model=Layers(scale, 0, **half), **settings))
        for _ in range(3):
            reduced(x)

        def by_hand() -> None:
            for place, tensor in zip(fixed, tensors, strict=True):
                place.copy_(tensor)
            recording.replay()

        ways: dict[str, Callable[[], Any]] = {
            "replay": recording.replay,
            "by_hand": by_hand,
            "full": lambda: copied(*tensors, batch=batch),
            "in_place": lambda: in_place(*rows, batch=batch),
            "reduced": lambda: reduced(x),
            "unsplit": lambda: unsplit(x, batch=batch),
        }
        row = in_turn(ways, scale.rounds, planted=("by_hand", "replay"))
        for num_splits in (2,) if scale.small else (32, 64):
            pieces = Scale(num_splits, scale.hidden, 512, 4, scale.rounds, scale.small)
            model = Layers(pieces, **half)
            step = capture(prepared(pieces, model=model, graph_mode="PIECEWISE", **settings))
            ((_, recorded),) = step.recordings()
            # few, or the queue of launches is full and the host waits for the device
            ways = {"step": partial(step, x, batch=batch), "replays": recorded.replay}
            times = in_turn(ways, scale.rounds, calls=5)
            row |= {f"{num_splits + 1}_graphs_{name}": us for name, us in times.items()}
            step.close()
    for each in (copied, in_place, unsplit):
        each.close()
    return row


def judged(row: Mapping[str, float], scale: Scale) -> list[str]:
    """What is above its limit in a row of `step_cost`."""
    seen = min(row[f"planted_{way}_us"] / row[f"{way}_us"] for way in ("by_hand", "replay"))
    return [
        *above("seen_of_5_percent_least", seen, scale),
        *above("full_over_by_hand", row["full_us"] / row["by_hand_us"], scale),
        *above("full_over_reduce_overhead", row["unsplit_us"] / row["reduced_us"], scale),
        *above("host_over_by_hand", row["full_host_us"] / row["by_hand_host_us"], scale),
        *above("host_over_in_place", row["in_place_host_us"] / row["by_hand_host_us"], scale),
        *(
            each
            for name, us in row.items() if name.endswith("graphs_step_host_us")
            for each in above("host_over_replays", us / row[name.replace("step", "replays")], scale)
        ),
    ]  # fmt: skip


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
        "failed": [
            *([] if capturing else ["no step captured"]),
            *above("lazy_capture_ms", max(plain + capturing), scale),
        ],
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
    return {**times, "failed": [f"the driver refused with {each}" for each in set(refusals)]}


def starts(scale: Scale) -> dict[str, Any]:
    """A cold and a warm start of the reference engine, each step of which is compared with the
    model; the processes that are on the device meanwhile."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (_job(scale, "--verify=all", f"--cache-dir={cache}") for _ in "12")
    return {
        **{f"cold_{name}": value for name, value in cold.items()},
        **{f"warm_{name}": value for name, value in warm.items()},
        "failed": [
            *above("warm_over_cold", warm["start_seconds"] / cold["start_seconds"], scale),
            *above("processes_on_device", cold["processes"]),
        ],
    }


def _job(scale: Scale, *options: str, model: str = "") -> dict[str, float]:
    """Serve a few requests in a process of its own, which fails if a result differs. What its
    report states, and the most processes and MiB on the device meanwhile."""
    model = "layers=2,hidden=64" if scale.small else model or "small"
    with tempfile.NamedTemporaryFile() as report:
        command = [sys.executable, "-m", "piecegraph", "run", "--device=cuda", f"--model={model}"]
        command += ["--requests=3" if scale.small else "--requests=32", f"--json={report.name}"]
        job = subprocess.Popen([*command, *options], stdout=sys.stderr)
        most = [0, 0]
        while job.poll() is None:
            most = list(map(max, most, _on_device()))
            time.sleep(0.2)
        if job.returncode:
            raise SystemExit(f"{' '.join(options)} ended with status {job.returncode}")
        facts = json.loads(Path(report.name).read_text())
    return {
        "start_seconds": sum(phase["seconds"] for phase in facts["startup"]["phases"]),
        "serving_seconds": facts["serving"]["seconds"],
        "tokens_per_second": facts["serving"]["generated_tokens_per_second"],
        "processes": most[0],
        "mib": most[1],
    }


def _on_device() -> tuple[int, int]:
    """Processes that have a context on a device, and their MiB; none without nvidia-smi."""
    query = ["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:
        said = []
    return len(said), sum(map(int, filter(str.isdigit, said)))


def two_models(scale: Scale) -> dict[str, Any]:
    """Two models in one process, compiled by Inductor, stored, and loaded again by a second process
    without a compile; nothing is left in the folder for temporary files."""
    if "TWO_MODELS" not in os.environ:
        with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"TMPDIR": temporary, "TWO_MODELS": cache}
            command = [sys.executable, "-m", "benchmarks.on_device", "two_models"]
            command += ["--small"] * scale.small
            said = []
            for answer in (Path(cache, name) for name in ("cold.json", "warm.json")):
                with answer.open("w") as file:  # Inductor's workers would hold a pipe open
                    subprocess.run(command, env=environment, stdout=file, check=True)
                said.append(json.loads(answer.read_text()))
            ours = [path.name for path in Path(temporary).glob("piecegraph-owned-*")]
        cold, warm = said
        failed = cold["failed"] + warm["failed"] + above("files_left", len(ours))
        if warm["compiles"]:
            failed.append(f"{warm['compiles']} pieces were compiled by a warm start")
        return {
            **cold,
            "files_left": len(ours),
            "warm_compiles": warm["compiles"],
            "failed": failed,
        }
    worst, compiles = 0.0, 0
    for hidden in (scale.hidden, scale.hidden // 2):
        sized = Scale(2, hidden, 64, 4, 1, scale.small)
        settings: dict[str, Any] = {"compiler": "inductor", "cache": True}
        settings["cache_dir"] = os.environ["TWO_MODELS"]
        model, plain = captured(sized, **settings), Layers(sized)
        x = torch.randn(4, hidden, device=CUDA)
        with torch.no_grad():
            worst = max(worst, (model(x, batch=decode(4)) - plain(x)).abs().max().item())
        compiles += model.report()["counters"]["inductor_compiles"]
        model.close()
    return {"difference": worst, "compiles": compiles, "failed": above("difference", worst)}


def libraries(scale: Scale) -> dict[str, Any]:
    """Pieces as ahead-of-time libraries, and compiled for one size by timing kernels (level 3)."""
    result, failed = {}, []
    plain, x = Layers(scale), torch.randn(8, scale.hidden, device=CUDA)
    for name, level in (("library", 2), ("tuned", 3)):
        with tempfile.TemporaryDirectory() as cache:
            settings: dict[str, Any] = {"compiler": "inductor", "cache": True, "cache_dir": cache}
            settings |= {"capture_sizes": (8,), "level": level}
            settings |= {"codegen": {"sizes": (8,)}} if level == 3 else {}
            began = time.monotonic()
            model = captured(scale, **settings)
            result[f"{name}_seconds"] = time.monotonic() - began
            with torch.no_grad():
                worst = (model(x, batch=decode(8)) - plain(x)).abs().max().item()
            result[f"{name}_difference"] = worst
            failed += above("difference", worst)
            model.close()
    return {**result, "failed": failed}


def attention(scale: Scale) -> dict[str, Any]:
    """The paged kernel beside SDPA on contiguous keys and values: bfloat16, one token a request."""
    heads, kv_heads, dim = (4, 2, 16) if scale.small else (32, 8, 128)
    rows, failed = [], []
    only_math = sdpa_kernel([SDPBackend.MATH])  # the stand-in has no other
    with only_math if scale.small else nullcontext():
        for num_reqs in (1, 2) if scale.small else (1, 32):
            for context in (16,) if scale.small else (1024, 8192):
                row = _attention_row(num_reqs, context, heads, kv_heads, dim, scale.rounds)
                rows.append({"num_reqs": num_reqs, "context": context, **row})
                failed += above("bf16_difference", row["difference"])
                failed += above("attention_over_sdpa", row["paged_us"] / row["sdpa_us"], scale)
    return {"rows": rows, "failed": failed}


def _attention_row(
    num_reqs: int, context: int, heads: int, kv_heads: int, dim: int, rounds: int
) -> dict[str, float]:
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA}
    per_request = -(-context // 16)
    blocks = BlockManager(num_reqs * per_request + 1, 16)
    for i in range(num_reqs):
        blocks.grow(i, context)
    shares = [Share(Request(i, [0] * context, 1), context - 1, 1, True) for i in range(num_reqs)]
    buffers = MetadataBuffers(max_rows=num_reqs, max_blocks=per_request, device=CUDA, triton=True)
    descriptor = pg.BatchDescriptor(num_reqs, num_reqs)
    metadata = buffers.fill(StepSchedule(tuple(shares), ()), blocks, descriptor)
    pages = (num_reqs * per_request + 1, 16, kv_heads, dim)
    cache = LayerCache(*(torch.randn(pages, **half) for _ in "kv"), window=0)
    query = torch.randn(num_reqs, heads, dim, **half)
    key, value = (torch.randn(num_reqs, kv_heads, dim, **half) for _ in "kv")
    output = torch.empty_like(query)

    def paged() -> None:
        with pg.forward_context(pg.ForwardContext({"layer": cache}, metadata)):
            torch.ops.piecegraph_reference.paged_attention(query, key, value, output, "layer")

    paged()  # writes the last key, which SDPA is given, too
    tables = torch.tensor([blocks.table(i) for i in range(num_reqs)], device=CUDA)
    keys, values = (
        each[tables].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()
        for each in (cache.keys, cache.values)
    )

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query[:, :, None], keys, values, enable_gqa=True
        )

    worst = (sdpa()[:, :, 0] - output).abs().max().item()
    return {"difference": worst, **in_turn({"paged": paged, "sdpa": sdpa}, rounds)}


def serving(scale: Scale) -> dict[str, Any]:
    """The reference engine: `--overlap` gives the tokens that it gives without, on a device that is
    behind the host; then other requests with overlap and without, for time."""
    plain, overlapped = (_tokens(scale, overlap) for overlap in (False, True))
    differ = sum(one != other for one, other in zip(plain, overlapped, strict=True))
    result: dict[str, Any] = {"requests": len(plain), "tokens": sum(map(len, plain))}
    failed = above("requests_that_differ", differ)
    if scale.small:
        return {**result, "failed": failed}
    with tempfile.TemporaryDirectory() as cache:
        options = ("--verify=none", "--mode=full", "--dtype=bfloat16", f"--cache-dir={cache}")
        jobs = {
            "plain": _job(scale, *options, model="1b"),
            "overlapped": _job(scale, *options, "--overlap", model="1b"),
        }
    for way, job in jobs.items():
        result |= {f"{way}_{name}": value for name, value in job.items()}
    ratio = jobs["overlapped"]["serving_seconds"] / jobs["plain"]["serving_seconds"]
    return {**result, "failed": failed + above("overlap_over_plain", ratio, scale)}


def _tokens(scale: Scale, overlap: bool) -> list[list[int]]:
    """What a few requests generate. Nothing waits but the engine, and each step is queued behind
    other work: memory that is rewritten too early has not been copied then."""
    options = read_run_options(
        model="layers=1,hidden=64", requests=5, length_scale=0.05, max_num_reqs=3,
        max_num_tokens=16, capture_sizes="1,2,4,8,16", mode="full", backend="eager", no_cache=True,
        verify="none", device="cuda", overlap=overlap,
    )  # fmt: skip
    requests, console = read_requests(options), Console(file=io.StringIO())
    work = torch.ones(scale.hidden, scale.hidden, device=CUDA)
    with main_job.start_service(options, requests, [], console) as service:
        run = service.engine.step

        def step() -> Any:
            torch.mm(work, work)
            return run()

        service.engine.step = step  # type: ignore[method-assign]
        main_job.serve(service, requests, console)
    return [request.tokens for request in requests]


def timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def seconds(
    fn: Callable[[], Any],
    calls: int,
    wait: Callable[[], Any],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Seconds until `calls` calls were queued, and until their work was done."""
    wait()
    began = clock()
    for _ in range(calls):
        fn()
    queued = clock()
    wait()
    return queued - began, clock() - began


def in_turn(
    fns: Mapping[str, Callable[[], Any]],
    rounds: int,
    calls: int = CALLS,
    planted: Sequence[str] = (),
    wait: Callable[[], Any] = torch.cuda.synchronize,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """`<name>_us` of a call and `<name>_host_us` until it was queued: medians of groups of `calls`
    that take turns. Of those in `planted` there is a second group, with one call more."""
    groups = {name: (fn, calls) for name, fn in fns.items()}
    groups |= {f"planted_{name}": (fns[name], calls + 1) for name in planted}
    times: dict[str, list[float]] = {}
    with torch.no_grad():
        for fn in fns.values():
            fn()
        for _ in range(rounds):
            for name, (fn, count) in groups.items():
                host, whole = seconds(fn, count, wait, clock)
                times.setdefault(f"{name}_us", []).append(whole / calls * 1e6)
                times.setdefault(f"{name}_host_us", []).append(host / calls * 1e6)
    return {name: median(each) for name, each in times.items()}


def above(name: str, value: float, timed_at: Scale | None = None) -> list[str]:
    """`value`, if it is outside of its limit in `device.toml`. A time (`timed_at` a scale) has no
    limit on the stand-in."""
    limit, least = STATED["limits"][name], name.endswith("_least")
    if (timed_at is not None and timed_at.small) or (value >= limit if least else value <= limit):
        return []
    return [f"{name} is {value:.4g}, the limit is {limit:g}"]


MEASUREMENTS = {
    each.__name__: each
    for each in (
        captured_decode, step_cost, first_replay, graph_bytes, plan_and_largest_step,
        engine_graph_beside_ours, lazy_under_load, executable_update, starts, two_models, libraries,
        invalid_access, two_ranks, attention, serving,
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
    return 1 if result.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
