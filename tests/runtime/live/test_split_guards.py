"""A model with a tile table in each mode: batches are never padded into another interval."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from piecegraph import Batch, Config, GraphMode, compile_ahead, prepare
from piecegraph.dispatch import Reason
from piecegraph.runtime.core.records import BundleFailed

from ..conftest import Computes, right_step, small_config, strict_backend

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("one_cache", "mix_op")]

SIZES = (1, 7, 8, 9, 10, 63, 64, 65, 66, 96)
CAPTURES = (4, 8, 12, 80, 96)
MODES = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)


class Tiled(nn.Module):
    """Its values depend on the tile, so that a step in another interval is a wrong number."""

    def __init__(self, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.rand(4) for _ in range(layers))
        self.register_buffer("steps", torch.zeros(1))
        self.requires_grad_(False)

    def forward(self, x):
        m = x.shape[0]
        tile = 1 if m <= 8 else 2 if m <= 64 else 4
        for weight in self.weights:
            y = (x * weight).sin()
            out = torch.empty_like(y)
            torch.ops.live_tests.mix(y, out)
            x = x + out * tile
        return x


def prepared(model, mode, **settings):
    given = {
        "inputs": {"x": "float32[num_tokens, 4]"},
        "splitting_ops": ("live_tests::mix",),
        "max_num_tokens": 96,
        "max_num_reqs": 96,
        "capture_sizes": CAPTURES,
        "graph_mode": mode,
        "attention": {"support": "ALWAYS"},
        "tracing": {"guards": "split"},
        "compiler": "texts",
    }
    served = prepare(model, Config(**{**given, **settings}), backend=strict_backend())
    served.capture()
    return served


def check(served, plain=None):
    """Run steps that must equal the plain model's; the mode and padded size of each."""
    plain, used = plain or Tiled(), {}
    for size in (*SIZES, *reversed(SIZES)):
        x = torch.randn(size, 4)
        decision = served.dispatch(Batch(size, 1))
        used[size] = f"{decision.mode.name} {decision.descriptor.num_tokens}"
        torch.testing.assert_close(served.run(decision, x), plain(x), rtol=1e-4, atol=1e-4)
    return used


@pytest.mark.parametrize("mode", MODES)
def test_steps_equal_the_model_on_both_sides_of_each_boundary(mode):
    served = prepared(Tiled(), mode)
    served.seal()
    ranges = served.report()["pieces"]["ranges"]
    assert ranges == [[1, 8], [9, 64], [65, 96]]
    used = check(served)
    if mode is not GraphMode.NONE:
        name = mode.name
        padded = {1: 4, 7: 8, 8: 8, 9: 12, 10: 12, 65: 80, 66: 80, 96: 96}
        expected = {size: f"{name} {to}" for size, to in padded.items()}
        assert used == expected | {63: "NONE 63", 64: "NONE 64"}


class Chosen(Tiled):
    """Few tokens, or many, run no splitting op."""

    def __init__(self, few):
        super().__init__()
        self.few = few

    def forward(self, x):
        is_split = self.few if x.shape[0] <= 8 else not self.few
        return super().forward(x) if is_split else x * self.weights[0]


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_splitting_op_may_run_at_some_sizes_only(mode, few):
    model = Chosen(few)
    used = check(prepared(model, mode), plain=model)
    modes = {(name.partition(" ")[0], size <= 8) for size, name in used.items()}
    assert {(mode.name, True), (mode.name, False)} <= modes


def test_a_batch_that_could_only_be_padded_into_the_next_interval_runs_without_a_graph():
    served = prepared(Tiled(), GraphMode.PIECEWISE)
    decision = served.dispatch(Batch(64, 1))
    assert decision.reason is Reason.PADDING_LIMIT
    obstacles = {
        each.entry.descriptor.num_tokens: each.obstacle
        for each in served.dispatcher.explain(Batch(64, 1))
    }
    assert obstacles[80] is obstacles[96] is Reason.PADDING_LIMIT
    assert served.dispatcher.plan.as_json()["ends"] == [8, 64]


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=[pytest.mark.heavy] * (mode != GraphMode.FULL)) for mode in MODES],
)
def test_a_warm_start_serves_all_intervals(mode, tmp_path, monkeypatch):
    monkeypatch.delenv("PIECEGRAPH_OFF", raising=False)
    settings = {"cache_dir": tmp_path, "cache": {"verify_bundle": "background"}}
    prepared(Tiled(), mode, **settings)
    torch._dynamo.reset()
    served = prepared(Tiled(), mode, **settings)
    assert served.report()["cache"]["hit"]
    assert served.report()["counters"]["dynamo_traces"] == 0
    assert not served.events.named("compile.end")
    check(served)
    assert served.parts.starts.wait_until_verified(300) is True
    check(served)


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
def test_the_same_under_inductor(mode, tmp_path):
    settings = {"compiler": "inductor", "cache_dir": tmp_path}
    counts = []
    for _ in range(2):
        torch._dynamo.reset()
        served = prepared(Tiled(), mode, **settings)
        check(served)
        counters = served.report()["counters"]
        counts.append((counters["dynamo_traces"], counters["inductor_compiles"]))
    unique = served.report()["pieces"]["unique"]
    assert counts == [(3, unique), (0, 0)]


def test_served_uncompiled_until_all_intervals_are_compiled(tmp_path):
    settings = {"cache_dir": tmp_path, "bundle": "serve"}
    served = prepared(Tiled(), GraphMode.PIECEWISE, **settings)
    right_step(served, Tiled(), torch.randn(9, 4))
    assert served.parts.starts.wait_until_compiled(300)
    assert check(served)[9] == "PIECEWISE 12"


def test_shadow_steps_agree_in_every_interval():
    served = prepared(Tiled(), GraphMode.PIECEWISE, shadow={"every": 1, "share": 1.0})
    check(served)
    facts = served.report()["shadow"]
    assert sum(each["count"] for each in facts["proved"]) == 2 * len(SIZES)
    assert facts["wrong"] == []


def test_rows_that_one_interval_mixes_are_found_there():
    class Mixes(Tiled):
        def forward(self, x):
            x = super().forward(x)
            return x - x.sum() if x.shape[0] <= 8 else x

    served = prepared(Mixes(), GraphMode.PIECEWISE)
    assert served.report()["rows_mixed"]
    assert served.dispatch(Batch(7, 1)).descriptor.num_tokens == 7
    assert served.dispatch(Batch(8, 1)).mode.name == "PIECEWISE"
    assert prepared(Tiled(), GraphMode.PIECEWISE).report()["rows_mixed"] == []


def test_profiler_ranges_name_the_pieces_of_the_interval():
    class Deeper(Tiled):
        def forward(self, x):
            x = super().forward(x)
            if x.shape[0] <= 8:
                out = torch.empty_like(x)
                torch.ops.live_tests.mix(x, out)
                x = x * 2 + out
            return x

    served, model = prepared(Deeper(), GraphMode.PIECEWISE), Deeper()
    served.parts.log.profiler_ranges()
    counts = []
    for size in (4, 12):
        x = torch.randn(size, 4)
        with torch.profiler.profile() as profiler:
            result = served.run(served.dispatch(Batch(size, 1)), x)
        torch.testing.assert_close(result, model(x))
        counts.append(sum(each.name.startswith("piece ") for each in profiler.events()))
    assert counts == [4, 3]


def test_an_error_of_loaded_code_names_its_piece_in_every_interval(tmp_path):
    settings = {"cache_dir": tmp_path, "cache": {"verify_bundle": "off"}}
    prepared(Tiled(), GraphMode.NONE, **settings)
    served = prepared(Tiled(), GraphMode.NONE, **settings)
    decision = served.dispatch(Batch(3, 1))

    def fails(args):
        raise ZeroDivisionError

    compiled = served.compiled
    last = compiled.plan.at(3).ranges[0].artifacts[-1]
    pieces = [fails if n == last else piece for n, piece in enumerate(compiled.pieces)]
    served._core.steps.code.bind(replace(compiled, pieces=tuple(pieces)))
    with pytest.raises(ZeroDivisionError) as caught:
        served.run(decision, torch.randn(3, 4))
    assert any("In the code of bundle" in note for note in caught.value.__notes__)
    (failed,) = served.records.of(BundleFailed)
    assert failed.reason.startswith("piece 2 failed when it ran")


@pytest.mark.heavy
def test_libraries_ahead_of_time_serve_all_intervals(tmp_path):
    cached = {"cache": True, "cache_dir": tmp_path, "compiler": "inductor"}
    config = small_config(32, graph_mode="NONE", tracing={"guards": "split"}, **cached)
    model = Computes(lambda x: x.sin() * (2 if x.shape[0] <= 8 else 3))
    assert compile_ahead(model, config)
    served = prepare(model, config)
    assert served.report()["cache"]["hit"]
    assert served.report()["counters"]["dynamo_traces"] == 0
    for size in (1, 8, 9, 32):
        right_step(served, model, torch.randn(size, 4))
