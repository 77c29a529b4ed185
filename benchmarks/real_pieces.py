"""Steps over real pieces on the CPU: a decoder of 32 layers, hidden 64, one token.

Attention is a copy, so that the time between pieces is measured. The baseline (`floor`) is a loop
in C++ over the same AOTInductor libraries, built with torch's extension builder if that works.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piecegraph import Batch, Config, GraphMode, PreparedModel, compile_ahead, prepare

from .timing import LIBRARY, interleaved, row

HIDDEN, LAYERS = 64, 32

LIBRARY.define("copy(Tensor x, Tensor(a!) output) -> ()")


def _copy(x: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(x)


LIBRARY.impl("copy", _copy, "CPU")
torch.library.register_fake("piecegraph_bench::copy", lambda x, output: None, lib=LIBRARY)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.q_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.q_proj(self.norms[0](x))
        output = torch.empty_like(query)
        torch.ops.piecegraph_bench.copy(query, output)
        x = x + self.o_proj(output)
        return x + self.down(nn.functional.silu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def real_rows(rounds: int, steps: int) -> list[dict[str, Any]]:
    """Each way to run a step, compared with the C++ loop, or with a Python loop without one."""
    model, x = Layers(), torch.randn(1, HIDDEN)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
            ways = _ways(model, x, Path(folder))
            times = dict(zip(ways, interleaved(list(ways.values()), rounds, steps), strict=True))
    finally:
        torch.set_num_threads(threads)
    floor = next(iter(times))
    return [row(way, floor, times[way], times[floor]) for way in times]


def _ways(model: nn.Module, x: torch.Tensor, folder: Path) -> dict[str, Callable[[], Any]]:
    """Name and function of each way, the baseline first."""
    config = Config(
        splitting_ops=("piecegraph_bench::copy",),
        inputs={"x": f"float32[num_tokens, {HIDDEN}]"},
        max_num_tokens=8,
        max_num_reqs=8,
        capture_sizes=(1,),
        graph_mode=GraphMode.PIECEWISE,
        cache_dir=folder / "cache",
    )
    inductor = _captured(model, config)
    ways: dict[str, Callable[[], Any]] = {
        "Inductor pieces, NONE": _step(inductor, x, without_graph=True),
        "Inductor pieces, PIECEWISE on replay": _step(inductor, x),
        "plain torch.compile": partial(torch.compile(model), x),
        "eager": partial(model, x),
    }
    if not compile_ahead(model, config):
        return ways
    libraries = _captured(model, config)
    ways = {
        "libraries, NONE": _step(libraries, x, without_graph=True),
        "libraries, PIECEWISE on replay": _step(libraries, x),
        **ways,
    }
    loop = _cpp_loop(libraries, x, folder / "extension")
    return {"libraries, C++ loop": loop, **ways} if loop else ways


def _captured(model: nn.Module, config: Config) -> PreparedModel:
    prepared = prepare(model, config)
    prepared.capture()
    return prepared


def _step(
    prepared: PreparedModel, x: torch.Tensor, *, without_graph: bool = False
) -> Callable[[], Any]:
    # above the largest captured size there is no graph; the code serves any size
    batch = Batch(2, 1) if without_graph else Batch(1, 1)
    decision = prepared.dispatch(batch)
    assert (decision.graph_index < 0) is without_graph
    return lambda: prepared.run(decision, x)


_SOURCE = """
#include <torch/extension.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
using Runner = torch::inductor::AOTIModelContainerRunnerCpu;

struct Step { Runner* piece; std::vector<int64_t> args, outs; };

struct Loop {
  std::vector<at::Tensor> values;
  std::vector<Step> steps;
  void set(int64_t place, at::Tensor value) {
    if (place >= (int64_t)values.size()) values.resize(place + 1);
    values[place] = value;
  }
  void piece(Runner& runner, std::vector<int64_t> args, std::vector<int64_t> outs) {
    steps.push_back({&runner, args, outs});
  }
  void copy(int64_t from, int64_t to) { steps.push_back({nullptr, {from}, {to}}); }
  void run() {
    at::NoGradGuard no_grad;
    for (auto& step : steps) {
      if (step.piece == nullptr) { values[step.outs[0]].copy_(values[step.args[0]]); continue; }
      std::vector<at::Tensor> inputs;
      inputs.reserve(step.args.size());
      for (auto place : step.args) inputs.push_back(values[place]);
      auto results = step.piece->run(inputs);
      for (size_t i = 0; i < step.outs.size(); i++) values[step.outs[i]] = results[i];
    }
  }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<Loop>(m, "Loop").def(pybind11::init<>())
    .def("set", &Loop::set).def("piece", &Loop::piece, pybind11::keep_alive<1, 2>())
    .def("copy", &Loop::copy).def("run", &Loop::run)
    .def("get", [](Loop& loop, int64_t place) { return loop.values[place]; });
}
"""


def _cpp_loop(prepared: PreparedModel, x: torch.Tensor, folder: Path) -> Callable[[], Any] | None:
    """The plan's steps as a loop in C++, checked once; None where no extension can be built."""
    from torch.utils.cpp_extension import load_inline

    folder.mkdir()
    try:
        module = load_inline(  # type: ignore[no-untyped-call]
            "piecegraph_bench_loop",
            _SOURCE,
            build_directory=str(folder),
            extra_cflags=["-O2"],
            no_implicit_headers=True,
        )
    except (OSError, RuntimeError) as error:
        print(f"no C++ loop to compare with: {error}", flush=True)
        return None
    compiled = prepared.compiled
    plan, loop = compiled.plan, module.Loop()
    places: dict[str, int] = {}

    def place(name: str) -> int:
        if name not in places:
            places[name] = len(places)
            loop.set(places[name], torch.empty(0))
        return places[name]

    loop.set(place(plan.inputs[0].name), x)
    for weight in plan.weights:
        loop.set(place(weight.name), compiled.weights[weight.target])
    artifacts = plan.ranges[0].artifacts
    for step in plan.steps:
        if step.kind == "piece":
            runner = compiled.pieces[artifacts[step.piece]].__self__  # type: ignore[attr-defined]
            loop.piece(runner, [place(name) for name in step.args], [place(n) for n in step.outs])
        else:
            loop.copy(*(place(argument["ref"]) for argument in step.args))
    loop.run()
    torch.testing.assert_close(loop.get(place(plan.results[0].name)), compiled.link()(x)[0])
    run: Callable[[], Any] = loop.run
    return run
