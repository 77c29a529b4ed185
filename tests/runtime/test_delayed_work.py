"""Steps whose work is delayed: the numbers that a device would give, and early rewrites by name."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import pickle
import re
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piecegraph import Batch, GraphMode, PreparedModel, get_forward_context, prepare
from piecegraph.errors import ResultOverwritten, RewrittenEarly
from piecegraph.runtime.backends.replay.backend import ReplayBackend, ReplayOptions
from piecegraph.torch_compat.basics.tensors import last_modes
from tests.processes import in_a_thread

from .conftest import captured, compile_once, prepare_on_replay

MAX_TOKENS, HIDDEN, SLOTS = 8, 4, 32
GRAPH_MODES = [GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL_DECODE_ONLY]


@dataclass
class Metadata:
    """The slots of each token: the first one is its own."""

    table: Tensor = field(default_factory=lambda: torch.zeros(MAX_TOKENS, 2, dtype=torch.int64))
    lens: Tensor = field(default_factory=lambda: torch.ones(MAX_TOKENS))
    factors: list[float] = field(default_factory=lambda: [1.0])


def attend(query, out):
    context = get_forward_context()
    metadata, kv = context.metadata, context.layers["kv"]
    table, lens = metadata.table[: len(query)], metadata.lens[: len(query)]
    kv.index_copy_(0, table[:, 0], query)
    out.copy_(kv[table].sum(1) / lens[:, None] * metadata.factors[0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.rand(16, HIDDEN), requires_grad=False)
        self.adapters = nn.Parameter(torch.rand(3, HIDDEN), requires_grad=False)
        self.scale = nn.Buffer(torch.full((HIDDEN,), 0.5))

    def forward(self, ids, loras, x):
        query = self.embedding[ids] + self.adapters[loras] + x
        out = torch.empty_like(query)
        torch.ops.delayed_work.attend(query, out)
        return out * self.scale


@pytest.fixture(scope="module")
def compiled(temporary_op):
    op = temporary_op("delayed_work::attend", "(Tensor q, Tensor(a!) out) -> ()", attend)
    tokens = "int64[num_tokens]"
    return compile_once(
        Model(),
        splitting_ops=(op,),
        inputs={"ids": tokens, "loras": tokens, "x": f"float32[num_tokens, {HIDDEN}]"},
        max_num_tokens=MAX_TOKENS,
        max_num_reqs=MAX_TOKENS,
        attention={"support": "UNIFORM_SINGLE_TOKEN_DECODE"},
    )


@dataclass
class Scene:
    """An engine with one step in flight."""

    prepared: PreparedModel
    model: Model
    kv: Tensor
    ids: Tensor
    metadata: Metadata = field(default_factory=Metadata)
    loras: Tensor = field(default_factory=lambda: torch.ones(4, dtype=torch.int64))
    x: Tensor = field(default_factory=lambda: torch.rand(4, HIDDEN))

    def step(self):
        decision = self.decide()
        inputs = self.ids[:4], self.loras, self.x
        return self.prepared.run(decision, *inputs, metadata=self.metadata)

    def decide(self):
        return self.prepared.dispatch(Batch(4, 4, is_decode=True, query_len=1))


@pytest.fixture
def make_scene(compiled):
    scenes = []

    def make(mode, sizes=(4, 8), settings=None, **options):
        torch.manual_seed(1)
        model, kv = Model(), torch.rand(SLOTS, HIDDEN)
        ids = torch.arange(MAX_TOKENS)
        config, traced = compiled
        code = replace(traced, model=model, conditions=None).rebound()
        given = config.changed(**settings or {}), mode, sizes, {"kv": kv}, options
        prepared = prepare_on_replay(code, *given, input_buffers={"ids": ids})
        scenes.append(Scene(prepared, model, kv, ids))
        metadata = scenes[-1].metadata
        prepared.capture(lambda *facts: metadata)  # of slot 0
        metadata.table.copy_(torch.arange(2 * MAX_TOKENS).view(MAX_TOKENS, 2))
        return scenes[-1]

    with torch.no_grad():
        yield make
    for scene in scenes:
        scene.prepared.close()
    gc.collect()  # results that tracebacks hold
    for scene in scenes:
        scene.prepared.backend.synchronize()
    assert last_modes() == (None, None)


def test_a_step_runs_when_its_result_is_read(make_scene):
    """In every way to read it, also through operations of the engine in between."""
    for mode in GRAPH_MODES:
        plain, late = make_scene(mode), make_scene(mode, delay=True)
        expected = plain.step().clone()
        reads = [
            lambda r: r.tolist(),
            lambda r: r.numpy().tolist(),
            lambda r: np.asarray(r).tolist(),
            lambda r: [[e.item() for e in row] for row in r],
            lambda r: r.t().contiguous().t().tolist(),
            lambda r: torch.cat([r[:2] * 1, r[2:].clone()]).tolist(),
            lambda r: torch.zeros(4, HIDDEN).copy_(r).tolist(),
            lambda r: copy.deepcopy(r).tolist(),
            lambda r: pickle.loads(pickle.dumps(r)).tolist(),
        ]
        for inference, read in itertools.product((False, True), reads):
            kv = late.kv.clone()
            with torch.inference_mode(inference):  # in which composite operators arrive whole
                result = late.step()
                event = late.prepared.reads_done()
                assert not event.query()
                assert read(result) == expected.tolist()
            assert event.query()
            late.kv.copy_(kv)
        late.step()
        assert torch.equal(late.kv, plain.kv)  # read after the step in the order of the stream
        event = late.prepared.reads_done()
        event.synchronize()
        assert event.query()


@pytest.mark.parametrize("mode", [GraphMode.NONE, GraphMode.PIECEWISE])
def test_lists_in_metadata_may_be_rewritten_when_run_has_returned(make_scene, mode):
    """On a device the Python of a splitting op has run by then. Until the work ran, results are
    poison in each mode."""
    plain, late = make_scene(mode), make_scene(mode, delay=True, fail_on_early_writes=True)
    expected = plain.step().tolist()
    result = late.step()
    late.metadata.factors[0] = 100.0
    memory = (ctypes.c_float * result.numel()).from_address(result.data_ptr())
    assert np.isnan(memory).all()
    assert result.tolist() == expected


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_an_early_rewrite_gives_what_a_device_gives(make_scene, mode):
    plain, late = make_scene(mode), make_scene(mode, delay=True)
    x = late.x.clone()
    result = late.step()
    late.x.zero_()
    late.metadata.lens.fill_(2)
    plain.x.zero_()
    plain.metadata.lens.fill_(2)
    assert torch.equal(result, plain.step())
    late.x.copy_(x)
    result = late.step()
    late.prepared.reads_done().wait()  # from here on it may be rewritten
    late.x.zero_()
    plain.x.copy_(x)
    assert torch.equal(result, plain.step())
    late.x.copy_(x)
    result = late.step()
    late.model.embedding.data = late.model.embedding.data * 2  # the step has the old memory
    assert torch.equal(result, plain.step())


def inputs(scene):
    scene.x.zero_()


def metadata(scene):
    scene.metadata.lens.add_(1)


def tables(scene):
    scene.metadata.table[0, 1] = 9


def sampled_tokens(scene):
    scene.ids[:4] = torch.tensor([5, 6, 7, 8])


def kv_freed_and_reused(scene):
    scene.kv[3].fill_(9)


def lora_indices(scene):
    scene.loras[1] = 2


def refit_of_buffers(scene):
    scene.model.scale.mul_(2)


def refresh(scene):
    old = scene.model.embedding.data
    scene.model.embedding.data = old * 2
    old.zero_()  # its memory is given to others before the step ran
    scene.prepared.refresh()


def pinned_staging(scene):
    staging = torch.zeros(MAX_TOKENS)
    scene.metadata.lens.copy_(staging, non_blocking=True)
    staging.fill_(3)


def pinned_staging_by_numpy(scene):
    staging = np.zeros(MAX_TOKENS, np.float32)
    scene.metadata.lens.copy_(torch.from_numpy(staging), non_blocking=True)
    staging[:] = 3


def two_streams(scene):
    in_a_thread(scene.metadata.table.zero_)


PLANTED = [
    (inputs, "input 'x'"),
    (metadata, "metadata.lens"),
    (tables, "metadata.table"),
    (sampled_tokens, "input 'ids'"),
    (kv_freed_and_reused, "layers['kv']"),
    (lora_indices, "input 'loras'"),
    (refit_of_buffers, "scale"),
    (refresh, "embedding"),
    (pinned_staging, "argument 0"),
    (pinned_staging_by_numpy, "argument 0"),
    (two_streams, "metadata.table"),
]


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_failure_37_an_early_rewrite_is_found_and_named(make_scene, mode):
    scene = make_scene(mode, delay=True, fail_on_early_writes=True)
    scene.step().tolist()
    for rewrite, buffer in PLANTED:
        scene.step().tolist()
        scene.step()
        with pytest.raises(RewrittenEarly) as error:
            rewrite_and_wait(scene, rewrite)
        facts, line = error.value.facts, rewrite.__code__.co_firstlineno
        lines = [f"{__file__}:{line + ahead}" for ahead in range(1, 6)]
        assert facts["buffer"] == buffer
        if "staging" in rewrite.__name__:
            assert facts["step"] == f"aten.copy_ (at {lines[1]})"
        else:
            assert re.fullmatch(rf"step \d+ \({mode.name[:4]}\w* 4\)", facts["step"])
        seen = "numpy" not in rewrite.__name__ and rewrite is not two_streams
        assert (error.value.where in lines) == seen
        assert ("torch does not see" in facts["by"]) != seen
        scene.prepared.refresh()  # what was queued is dropped, and steps go on
        rewrite_after(scene, rewrite)


def rewrite_and_wait(scene, rewrite):
    rewrite(scene)
    scene.prepared.backend.synchronize()


def rewrite_after(scene, rewrite):
    """The same write is right once the steps have read."""
    scene.step()
    scene.prepared.reads_done().synchronize()
    if "staging" not in rewrite.__name__:
        rewrite(scene)
    scene.prepared.backend.synchronize()


def release(scene):
    scene.prepared.release()


def evict(scene):
    scene.prepared.parts.strategies.capturer.captures.evict(scene.decide().graph_index)


@pytest.mark.parametrize("free", [release, evict])
@pytest.mark.parametrize("mode", GRAPH_MODES[1:])
def test_a_result_that_was_kept_is_found(make_scene, mode, free):
    """Of the step before, and of a graph that was freed; also a view of it."""
    scene = make_scene(mode, delay=True, fail_on_early_writes=True)
    kept, now = scene.step(), scene.step()
    for read in (kept.sum, kept[0].tolist):
        with pytest.raises(ResultOverwritten, match=r"step 1 .* after step 2 .*test_delayed_work"):
            read()
    copied = now.clone()
    free(scene)
    with pytest.raises(ResultOverwritten, match="the release of its graph"):
        now.tolist()
    assert copied.tolist()


@pytest.mark.parametrize("mode", GRAPH_MODES[1:])
@pytest.mark.parametrize("seed", [None, pytest.param(1, marks=pytest.mark.heavy)])
def test_graphs_change_between_steps_in_flight(make_scene, mode, seed):
    """Captured again after new weights, evicted, released, captured: as without delay."""

    def new_weights(scene):
        scene.model.embedding.data = scene.model.embedding.data * 2
        assert scene.prepared.refresh()

    def capture(scene):
        scene.prepared.capture(lambda *facts: Metadata(scene.metadata.table * 0))

    plain = make_scene(mode)
    late = make_scene(mode, delay=True, fail_on_early_writes=True, delay_seed=seed)
    results = []
    for scene in (plain, late):
        found = []
        for change in (new_weights, evict, capture, release, capture):
            found += [scene.step().clone() for _ in range(3)]
            if mode is GraphMode.PIECEWISE or change is not capture:
                change(scene)
        results.append([scene.step().clone(), *found])
    assert all(map(torch.equal, *results))
    assert torch.equal(plain.kv, late.kv)


@pytest.mark.parametrize("then", ["clone", "reading too late", "an early rewrite"])
@pytest.mark.parametrize("mode", GRAPH_MODES[1:])
def test_an_eviction_for_another_size_while_a_step_is_in_flight(make_scene, mode, then):
    """A dispatch that needs memory frees the graph of the step in flight: the step has run by then,
    its result is gone, and what was rewritten before is named."""
    graphs = 1 if mode is GraphMode.FULL_DECODE_ONLY else 2
    strategy = {"kind": "lazy", "max_bytes": graphs * 10_000 + 5_000}  # one size
    plain = make_scene(mode)
    late = make_scene(
        mode, (2, 4, 8), {"strategy": strategy}, delay=True, fail_on_early_writes=True,
        graph_bytes=10_000,
    )  # fmt: skip

    def padding(*facts):
        late.metadata.table.zero_()
        return late.metadata

    def evict_by_dispatch():
        late.prepared._core.dummies.metadata_for = padding
        while not late.prepared.events.named("capture.evicted"):
            late.prepared.dispatch(Batch(2, 2, is_decode=True, query_len=1))

    assert late.decide().descriptor.num_tokens == 4
    result, step = late.step(), rf"step 1 \({mode.name[:4]}\w* 4\)"
    kept = result.clone()
    if then == "an early rewrite":
        late.x.zero_()
        with pytest.raises(RewrittenEarly, match=rf"input 'x' before {step}"):
            evict_by_dispatch()
        return
    evict_by_dispatch()
    (evicted,) = late.prepared.events.named("capture.evicted")
    assert evicted.facts["num_tokens"] == 4
    if then == "clone":
        assert kept.tolist() == plain.step().tolist()
        assert torch.equal(late.kv[1:], plain.kv[1:])  # captures write to slot 0
    else:
        with pytest.raises(ResultOverwritten, match=rf"{step} .*the release of its graph"):
            result.tolist()


SEEDS = [None, 0, 1, 2]


@pytest.mark.parametrize("mode", GRAPH_MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_copied_may_be_rewritten_after_the_copies(make_scene, mode, seed):
    """Also the source of a copy that was queued before the step, whose rest need not have run."""
    plain = make_scene(mode)
    scene = make_scene(mode, delay=True, fail_on_early_writes=True, delay_seed=seed)
    assert scene.prepared.copies_done().query()  # from here on steps record it
    ready = set()
    for factor in (1.0, 2.0, 3.0):
        for each in (plain, scene):
            each.x.fill_(factor)
        staging = torch.full((MAX_TOKENS,), factor)
        scene.metadata.lens.copy_(staging, non_blocking=True)
        plain.metadata.lens.copy_(staging)
        result = scene.step()
        event = scene.prepared.copies_done()
        event.synchronize()
        assert event.query()
        ready.add(scene.prepared.reads_done().query())
        staging.fill_(9)
        if mode is not GraphMode.NONE:
            scene.x.zero_()
            scene.loras.zero_()
        assert result.tolist() == plain.step().tolist()
        scene.loras.fill_(1)
    assert ready == {False} if seed is None else ready


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_what_is_read_in_place_may_not_be_rewritten_after_the_copies(make_scene, mode):
    scene = make_scene(mode, delay=True, fail_on_early_writes=True)
    scene.prepared.copies_done()
    in_place = {f"input {name!r}" for name in scene.prepared.reads_in_place(scene.decide())}
    for rewrite, buffer in PLANTED[:7]:
        scene.step().tolist()
        result = scene.step()
        scene.prepared.copies_done().synchronize()
        rewrite(scene)
        if buffer.startswith("input") and buffer not in in_place:
            result.tolist()
            continue
        with pytest.raises(RewrittenEarly) as error:
            result.tolist()
        assert error.value.facts["buffer"] == buffer


class Writes(nn.Module):
    def forward(self, x, y):
        x.add_(1)
        return x * y


def test_inputs_that_a_step_writes_are_read_in_place():
    """What a graph writes to an input is copied back at its end."""
    tokens = "float32[num_tokens, 4]"
    config, compiled = compile_once(
        Writes(), inputs={"x": tokens, "y": tokens}, max_num_tokens=8, max_num_reqs=8
    )
    prepared = prepare_on_replay(compiled, config, GraphMode.FULL_DECODE_ONLY, (4, 8), {}, {})
    prepared.capture()
    decision = prepared.dispatch(Batch(4, 4, is_decode=True, query_len=1))
    assert decision.graph_index != -1
    assert prepared.reads_in_place(decision) == {"x"}
    prepared.close()


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_inputs_that_a_step_reads_in_place_are_named(make_scene, mode):
    """All of them without a graph; else those that the engine owns."""
    scene, every = make_scene(mode), {"ids", "loras", "x"}
    graph = mode is not GraphMode.NONE
    assert scene.prepared.reads_in_place(scene.decide()) == ({"ids"} if graph else every)
    scene.prepared.release()
    assert scene.prepared.reads_in_place(scene.decide()) == every


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_delayed_steps_are_proved_like_others(make_scene, mode):
    plain = make_scene(mode)
    settings = {"shadow": {"every": 2, "share": 1.0}}
    late = make_scene(mode, settings=settings, delay=True, fail_on_early_writes=True)
    results = [[scene.step().clone() for _ in range(4)] for scene in (plain, late)]
    assert all(map(torch.equal, *results))
    assert torch.equal(plain.kv, late.kv)
    facts = late.prepared.report()["shadow"]
    assert sum(each["count"] for each in facts["proved"]) == 2
    assert facts["wrong"] == []
    assert facts["stopped"] is None


ON_DEVICE = [inputs, metadata, tables, sampled_tokens, kv_freed_and_reused, lora_indices,
             refit_of_buffers, refresh]  # fmt: skip


@pytest.fixture(scope="module")
def attend_on_device():
    """Once: torch 2.11 refuses a second kernel."""
    torch.library.impl("delayed_work::attend", "cuda", attend)


@pytest.fixture
def device_scene(compiled, attend_on_device):
    scenes = []

    def make(mode):
        torch.manual_seed(1)
        model, kv = Model().cuda(), torch.rand(SLOTS, HIDDEN).cuda()
        ids = torch.arange(MAX_TOKENS).cuda()
        config = compiled[0].changed(graph_mode=mode, capture_sizes=(4, 8))
        prepared = prepare(model, config, layers={"kv": kv}, input_buffers={"ids": ids})
        table = torch.arange(2 * MAX_TOKENS).view(MAX_TOKENS, 2)
        metadata = Metadata((table * 0).cuda(), torch.ones(MAX_TOKENS).cuda())
        scene = Scene(prepared, model, kv, ids, metadata)
        scene.loras, scene.x = scene.loras.cuda(), scene.x.cuda()
        scenes.append(scene)
        prepared.capture(lambda *facts: metadata)
        metadata.table.copy_(table)
        return scene

    with torch.no_grad():
        yield make
    for scene in scenes:
        scene.prepared.close()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_on_a_device_other_streams_need_an_event(device_scene, mode):
    """The same rewrites by another stream: right after the event, else wrong in some order. For
    inputs that are copied the earlier event is enough."""
    if not hasattr(ctypes.CDLL("libcudart.so.13"), "stand_in_inject"):
        pytest.skip("needs the stand-in for the CUDA runtime, which has orders: make cuda-test")
    from tests.cuda_stand_in.control import StandIn

    scene, stand_in, other = device_scene(mode), StandIn(), torch.cuda.Stream()
    state = [scene.kv, scene.ids, scene.metadata.table, scene.metadata.lens, scene.loras, scene.x]

    def weights():
        return [scene.model.embedding.data, scene.model.scale]

    before = [each.clone() for each in state + weights()]
    expected = scene.step().clone()

    def is_right(rewrite, event, seed):
        for tensor, content in zip(state + weights(), before, strict=True):
            tensor.copy_(content)
        torch.cuda.synchronize()
        stand_in.seed(seed)
        result = scene.step().clone()
        if event is not None:
            event().wait(other)
        with torch.cuda.stream(other):
            rewrite(scene)
        torch.cuda.synchronize()
        return torch.allclose(result, expected)

    copies_done, reads_done = scene.prepared.copies_done, scene.prepared.reads_done
    copies_done()  # from here on steps record it
    for rewrite in ON_DEVICE:
        assert all(is_right(rewrite, reads_done, seed) for seed in range(8)), rewrite
        assert not all(is_right(rewrite, None, seed) for seed in range(64)), rewrite
        copied = mode is not GraphMode.NONE and rewrite in (inputs, lora_indices)
        assert all(is_right(rewrite, copies_done, seed) for seed in range(64)) == copied, rewrite


@pytest.mark.parametrize("fails", [False, True])
def test_steps_in_flight_and_their_failures_do_not_disturb_a_start(make_scene, fails):
    """The mode that sees the engine's operations would be in the way of Dynamo."""
    scene = make_scene(GraphMode.PIECEWISE, delay=True)
    if fails:
        scene.metadata.factors = []
    result = scene.step()
    if fails:
        with pytest.raises(IndexError):
            scene.prepared.backend.synchronize()
        assert last_modes() == (None, None)
    config = scene.prepared.config.changed(graph_mode="NONE")
    prepare(Model(), config, layers={"kv": scene.kv}).close()
    assert fails or not result.isnan().any()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Buffer(torch.ones(HIDDEN))

    def forward(self, x):
        return x * self.scale


def test_an_early_rewrite_of_a_weight_is_named_without_a_trace():
    model = Scaled()
    backend = ReplayBackend(ReplayOptions(delay=True, fail_on_early_writes=True))
    prepared = captured(model, 4, backend, capture_sizes=(4,), compile=False)
    result = prepared(torch.ones(4, HIDDEN), batch=Batch(4, 4))
    model.scale.fill_(2)
    with pytest.raises(RewrittenEarly, match="rewrote scale before"):
        result.sum().item()
    del result
    prepared.backend.synchronize()
    prepared.close()


def test_a_step_in_flight_is_in_no_key_of_another_model(tmp_path):
    """What sees the host's reads stays entered until the work has run."""
    model, backend = nn.Linear(HIDDEN, HIDDEN), ReplayBackend(ReplayOptions(delay=True))
    inputs = {"input": f"float32[num_tokens, {HIDDEN}]"}
    kept = {"compiler": "inductor", "cache": True, "cache_dir": str(tmp_path)}
    delayed = captured(model, 4, backend, inputs=inputs, capture_sizes=(4,), **kept)
    result = delayed(torch.ones(4, HIDDEN), batch=Batch(4, 4))
    assert last_modes() != (None, None)
    other = prepare(model, delayed.config, backend=ReplayBackend())
    assert other.report()["cache"]["hit"]
    other.close()
    result.sum().item()
    del result
    delayed.backend.synchronize()
    delayed.close()
