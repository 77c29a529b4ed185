"""Code that Inductor partitioned at the splitting ops: the model's results and state, in each
graph mode, by cold and by warm starts."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from piecegraph import Events, GraphMode, compile_ahead, prepare
from piecegraph.compile.bundle import bundle as bundles
from piecegraph.runtime.capture.recording import SegmentKind

from ..conftest import prepare_on_replay, right_step, small_config, strict_backend

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

WIDTH, SLOTS, LAYERS, SIZES = 8, 32, 2, (3, 4, 8, 1, 12, 2)
GRAPH, EAGER = SegmentKind.GRAPH, SegmentKind.EAGER
ran = []


def attend(query, key, out, layer):
    """Each row sees the rows before it."""
    ran.append("attend")
    out.copy_(query * key.cumsum(0))


def keep(key, cache, slots):
    """Write each row to its slot."""
    ran.append("keep")
    cache[slots] = key
    return key.new_empty(0)


def read(query, cache, slots, kept):
    ran.append("read")
    return query * (cache[slots] + cache[1:].mean(0))


def scan(value, decay, real, state):
    """A recurrence over the real rows, which goes on in the next step."""
    ran.append("scan")
    rows = []
    for row, rate, one in zip(value, decay, real, strict=True):
        state.copy_(torch.where(one > 0, rate * state + row, state))
        rows.append(state.clone())
    return torch.stack(rows), decay * 2


@pytest.fixture(scope="module", autouse=True)
def ops(temporary_op):
    schemas = {
        "attend(Tensor query, Tensor key, Tensor(a!) out, str layer) -> ()": (
            attend, lambda *_: None),
        "keep(Tensor key, Tensor(a!) cache, Tensor slots) -> Tensor": (
            keep, lambda key, *_: key.new_empty(0)),
        "read(Tensor query, Tensor cache, Tensor slots, Tensor kept) -> Tensor": (
            read, lambda query, *_: torch.empty_like(query)),
        "scan(Tensor value, Tensor decay, Tensor real, Tensor(a!) state) -> (Tensor, Tensor)": (
            scan, lambda value, *_: (torch.empty_like(value), torch.empty_like(value))),
    }  # fmt: skip
    for schema, functions in schemas.items():
        name, _, rest = schema.partition("(")
        temporary_op(f"partitions::{name}", f"({rest}", *functions)


class Layer(nn.Module):
    """Two projections of the normed rows around `mix`, then a gated MLP or experts."""

    def __init__(self, mix, experts):
        super().__init__()
        self.mix = mix
        self.project = nn.Linear(WIDTH, 2 * WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 4)
        self.register_buffer("cache", torch.zeros(SLOTS, WIDTH))
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x, slots, real):
        query, key = self.project(F.rms_norm(x, (WIDTH,))).chunk(2, -1)
        half = query.chunk(2, -1)
        x = x + self.mix(self, torch.cat([-half[1], half[0]], -1), key, slots, real)
        weights = self.router(x).softmax(-1).unsqueeze(-1)
        hidden = torch.einsum("td,edh->teh", x, self.up)
        return x + (torch.einsum("teh,ehd->ted", F.silu(hidden), self.down) * weights).sum(1)


live = torch.ops.partitions


def attends(layer, query, key, slots, real):
    out = torch.empty_like(query)
    live.attend(query, key, out, "layer")
    return out.sigmoid()


def keeps_and_reads(layer, query, key, slots, real):
    kept = live.keep(key.sin(), layer.cache, slots)
    return live.read(query * 2, layer.cache, slots, kept)


def scans(layer, query, key, slots, real):
    rows, rates = live.scan(query, key.sigmoid(), real, layer.state)
    return rows * rates + key


class Model(nn.Module):
    def __init__(self, mix, experts=1, gain=1.0, layers=LAYERS):
        super().__init__()
        torch.manual_seed(0)
        self.gain = gain
        self.layers = nn.ModuleList(Layer(mix, experts) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)

    def forward(self, x, slots, real):
        begin = x.sin()
        for layer in self.layers:
            x = layer(x, slots, real)
        return self.head(x * self.gain + begin), x.argmax(-1)


KINDS = {
    "decoder": (Model(attends, layers=1), 1),
    "experts": (Model(attends, experts=3), 1),
    "KV update": (Model(keeps_and_reads), 2),
    "recurrent": (Model(scans), 1),
}
"""By kind: the model, and how many splitting ops a layer has."""


def config(cache, mode, **settings):
    inputs = {"x": f"float32[num_tokens, {WIDTH}]", "slots": "int64[num_tokens]"}
    inputs["real"] = "float32[num_tokens]"
    kept = {"compiler": "inductor", "cache": True, "cache_dir": cache}
    config = small_config(16, inputs=inputs, capture_sizes=(2, 4, 8), graph_mode=mode, **kept)
    partition = {"splitting_ops": ("partitions::*",), "codegen.partition": "inductor"}
    return config.changed(**partition, **settings)


def check(prepared, model, expected):
    """Steps of the model and of `expected` give the same results and state; returns the modes of
    those that are not larger than all graphs."""
    modes = set()
    for size in SIZES:
        x, slots = torch.randn(size, WIDTH), torch.randperm(SLOTS - 1)[:size] + 1
        mode = right_step(prepared, expected, x, slots, torch.ones(size))
        modes |= {mode} if size <= 8 else set()
        for layer, other in zip(model.layers, expected.layers, strict=True):
            torch.testing.assert_close(layer.cache[1:], other.cache[1:])
            torch.testing.assert_close(layer.state, other.state)
    return modes


@pytest.mark.parametrize("most", [1, 16])
def test_code_for_one_token_alone_reads_no_other_rows(tmp_path, most):
    """Where torch asks of experts whether there is one token, or no step has more."""
    model = Model(attends, experts=3, layers=1)
    sizes = {"max_num_tokens": most, "max_num_reqs": most, "capture_sizes": (1,)}
    settings = config(tmp_path, GraphMode.NONE).changed(**sizes, **{"codegen.partition": "graph"})
    prepared = prepare(copy.deepcopy(model), settings, backend=strict_backend())
    for size in {1, most}:
        x, slots = torch.randn(size, WIDTH), torch.arange(size) + 1
        right_step(prepared, model, x, slots, torch.ones(size))


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.heavy] * (k != "decoder")) for k in KINDS]
)
def test_results_and_state_are_the_models(tmp_path, kind):
    original, per_layer = KINDS[kind]
    model = copy.deepcopy(original)
    cold = prepare(model, config(tmp_path, GraphMode.NONE), backend=strict_backend())
    ranges = cold.report()["pieces"]["ranges"]  # experts take one token in code of its own
    assert cold.report()["counters"]["inductor_compiles"] == len(ranges)
    assert ranges == ([[1, 1], [2, 16]] if kind == "experts" else [[1, 16]])
    assert cold.compiled.plan.piece_uses() == [0]
    for mode in (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL):
        settings = config(tmp_path, mode)
        warm = prepare(model, settings, backend=strict_backend())
        counters = warm.report()["counters"]
        assert (counters["dynamo_traces"], counters["inductor_compiles"]) == (0, 0)
        assert warm.compiled.from_bundle
        sizes = settings.capture_sizes or ()
        again = prepare_on_replay(cold.compiled, settings, mode, sizes, {}, {})
        for prepared in (again, warm):
            prepared.capture(lambda descriptor, mode: None)
            assert check(prepared, model, copy.deepcopy(model)) == {mode.name}
            recordings = [recording for _, recording in prepared.recordings()]
            assert len(recordings) == (0 if mode is GraphMode.NONE else 3)
            for segments in (recording.segments for recording in recordings):
                graphs = [each for each in segments if each.kind is SegmentKind.GRAPH]
                calls = [each for each in segments if each.kind is SegmentKind.EAGER]
                if mode is GraphMode.FULL:
                    assert (len(graphs), calls) == (1, [])
                else:  # a partition is one operation: nothing else is between splitting ops
                    assert {each.operations for each in graphs} == {1}
                    assert sum(len(each.calls) for each in calls) == len(model.layers) * per_layer
            prepared.close()


def averages(layer, query, key, slots, real):
    """Only the op is given what mixes rows."""
    out = torch.empty_like(query)
    live.attend(query - query.mean(0), key, out, "layer")
    return out


def test_rows_that_mix_before_a_splitting_op_are_found(tmp_path):
    model = Model(averages, layers=1)
    prepared = prepare(model, config(tmp_path, GraphMode.PIECEWISE), backend=strict_backend())
    prepared.capture(lambda descriptor, mode: None)
    (mixed,) = prepared.report()["rows_mixed"]
    assert "argument 0 of partitions.attend" in mixed["result"]
    assert check(prepared, model, copy.deepcopy(model)) == {"NONE", "PIECEWISE"}


@pytest.mark.heavy
def test_an_equal_bundle_is_verified_and_a_stale_one_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("PIECEGRAPH_OFF", raising=False)
    monkeypatch.setattr(bundles, "broken_conditions", lambda *_: [])  # only a trace can tell
    settings = config(tmp_path, GraphMode.NONE, **{"cache.verify_bundle": "before"})
    for gain, verified in ((1.0, "the model was traced by this start"), (1.0, True), (3.0, False)):
        model = Model(attends, gain=gain)
        prepared = prepare(model, settings, backend=strict_backend())
        assert prepared.report()["cache"]["verified"] == verified
        check(prepared, model, copy.deepcopy(model))
        prepared.close()


def test_partitions_have_no_ahead_of_time_library(tmp_path):
    """It would call the splitting ops itself, where no graph breaks."""
    events = Events()
    assert not compile_ahead(Model(attends), config(tmp_path, GraphMode.NONE), events=events)
    (failure,) = events.named("compile.library_failed")
    assert "cannot be partitioned" in failure.facts["reason"]
    assert events.counters["dynamo_traces"] == 0
