"""Steps are proved while a model serves: a wrong one takes out of service what shares its cause."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

from piecegraph import (
    Batch,
    GraphMode,
    ReplayBackend,
    RuntimeMode,
    get_forward_context,
    prepare,
)
from piecegraph.cache.settings import CacheSettings
from piecegraph.compile.bundle import bundle as bundles
from piecegraph.runtime import assemble
from piecegraph.runtime.core.records import ShadowStopped, WrongStep
from piecegraph.runtime.parts.checks.address_checks import Snapshot
from piecegraph.runtime.parts.checks.model_check import ModelCheck
from piecegraph.runtime.parts.proof.cause import Cause
from piecegraph.runtime.parts.proof.declared_writes import Stopped
from piecegraph.runtime.parts.proof.step_runs import KeptStep
from piecegraph.tools.steps import load_steps

from ..conftest import Computes, captured, small_config
from .conftest import HIDDEN, Gained, LiveServed, MixesRows, Model, Texts

Prepare = Callable[..., LiveServed]

EACH = {"every": 1, "share": 1.0}


def run(served, *lengths):
    """Run one step; whether it gives the plain model's rows."""
    try:
        served.step(*lengths)
    except AssertionError:
        return False
    return True


def the_wrong_step(prepared):
    (wrong,) = prepared.records.of(WrongStep)
    return wrong


def compiled_wrong(patch, at=None):
    """Pieces of the compiler add one to what they give, only `at` that size if it is stated."""

    def wrong(self, code):
        right = loaded(self, code)

        def run(args):
            rows = next(each for each in args if each.dim() > 1)
            results = right(args)
            hit = at is None or len(rows) == at
            return tuple(one + 1 for one in results) if hit else results

        return run

    loaded = Texts._loaded
    patch.setattr(Texts, "_loaded", wrong)


def test_right_steps_are_counted_and_change_nothing(prepare_live):
    served = prepare_live(shadow=EACH).capture()
    for _ in range(3):
        assert run(served, 3)
        assert run(served, 1, 1)
    facts = served.prepared.report()["shadow"]
    assert facts["stopped"] is None
    assert facts["proved"] == [
        {"mode": "PIECEWISE", "num_tokens": 2, "count": 3},
        {"mode": "PIECEWISE", "num_tokens": 4, "count": 3},
    ]
    assert facts["wrong"] == []


class LiesElsewhere(Model):
    """With another rounding its rows are no numbers."""

    def forward(self, x):
        parts = torch.full((4,), 0.25, device=x.device)
        one = (parts.sum() == 1).to(x.dtype)
        return super().forward(x) * (one / one)


def test_a_step_of_which_rounding_leaves_nothing_is_not_proved(prepare_live, monkeypatch):
    """Wrong results were within a tolerance that had no bound. What is equal is proved."""
    reason = "rounding alone changes all of row 0 of result 0"
    served = prepare_live(model=LiesElsewhere(), shadow=EACH).capture()
    assert run(served, 3)
    assert served.prepared.report()["shadow"]["skipped"] == {}
    compiled_wrong(monkeypatch)
    served = prepare_live(model=LiesElsewhere(), shadow=EACH).capture()
    assert not run(served, 3)
    facts = served.prepared.report()["shadow"]
    assert (facts["proved"], facts["wrong"], facts["stopped"]) == ([], [], None)
    assert facts["skipped"] == {reason: 1}
    assert reason in [row["not_yet"] for row in facts["graphs"]]


class Filled(Model):
    def forward(self, x):
        return super().forward(x) * torch.full((HIDDEN,), 0.37)


def test_a_step_beside_a_load_under_another_default_dtype_is_not_wrong(prepare_live):
    """The uncompiled model runs under the settings of now: all graphs left service."""
    served, x = prepare_live(Filled(), shadow=EACH), torch.rand(3, HIDDEN)
    served.prepared.capture()
    torch.set_default_dtype(torch.float64)
    try:
        served.prepared(x, batch=Batch(3, 3))
    finally:
        torch.set_default_dtype(torch.float32)
    facts = served.prepared.report()["shadow"]
    assert (facts["wrong"], facts["stopped"], facts["proved"]) == ([], None, [])
    (skipped,) = facts["skipped"]
    assert skipped.endswith("are others: default_dtype: torch.float32 -> torch.float64")
    assert run(served, 3)
    assert [row["count"] for row in served.prepared.report()["shadow"]["proved"]] == [1]


def test_a_default_device_of_the_engine_reaches_nothing(prepare_live):
    """A capture, a proof and a step make tensors of their own."""
    served, x = prepare_live(shadow=EACH), torch.rand(3, HIDDEN)
    with torch.device("meta"):
        served.prepared.capture()
        result = served.prepared(x, batch=Batch(3, 3))
    assert torch.equal(result, served.expected(x))
    assert len(served.prepared.report()["shadow"]["proved"]) == 1


def test_wrong_code_is_replaced_by_the_model(prepare_live, monkeypatch):
    compiled_wrong(monkeypatch)
    served = prepare_live(shadow=EACH).capture()
    served.prepared.seal()
    assert run(served, 3)  # the wrong step has the uncompiled model's result
    wrong = the_wrong_step(served.prepared)
    assert wrong.out_of_service == Cause.BUNDLE
    assert wrong.graphs == ["PIECEWISE 8", "PIECEWISE 4", "PIECEWISE 2"]
    assert not served.prepared.compiled.traced
    assert run(served, 3)
    (step,) = load_steps(wrong.file)
    assert step.batch.num_tokens == 3


def test_a_proved_step_is_freed_without_garbage_collection(prepare_live):
    """It holds copies of all state that it wrote, and engines pause the collector."""
    served = prepare_live(shadow=EACH).capture()
    gc.collect()
    gc.disable()
    try:
        assert run(served, 3)
        assert not any(isinstance(each, KeptStep) for each in gc.get_objects())
    finally:
        gc.enable()
    assert served.prepared.report()["shadow"]["proved"]


def test_dummy_steps_of_an_engine_are_not_proved(prepare_live, monkeypatch):
    """The first real one is."""
    compiled_wrong(monkeypatch)
    served = prepare_live(shadow=EACH)
    is_real = False
    served.prepared.prove_where(lambda: is_real)
    assert [run(served, 3), run(served, 3)] == [False, False]
    assert served.prepared.report()["shadow"]["skipped"] == {"a dummy step of the engine": 2}
    is_real = True
    assert run(served, 3)
    assert the_wrong_step(served.prepared).out_of_service == Cause.BUNDLE


def test_a_kernel_wrong_at_one_size_takes_the_code_out(prepare_live, monkeypatch):
    monkeypatch.setattr(assemble.row_mixing, "known_mixed_rows", lambda *_, **__: [])
    compiled_wrong(monkeypatch, at=4)
    served = prepare_live(shadow=EACH, cache=False).capture()
    assert run(served, 2)
    assert run(served, 3)
    assert the_wrong_step(served.prepared).out_of_service == Cause.CODE
    assert run(served, 4)


def test_a_wrong_step_says_what_changed(prepare_live, monkeypatch):
    monkeypatch.setattr(ModelCheck, "check_step", lambda *_: None)  # its turn comes later
    served = prepare_live(Gained(2.0), shadow=EACH).capture()
    assert run(served, 3)
    served.model.gain = 3.0
    assert run(served, 3)
    assert the_wrong_step(served.prepared).changed == "model.gain: 2.0 -> 3.0"


def test_a_stale_bundle_is_put_aside(prepare_live, monkeypatch):
    monkeypatch.setattr(bundles, "broken_conditions", lambda *_: [])
    monkeypatch.setattr(ModelCheck, "check_step", lambda *_: None)  # its turn comes later
    off = CacheSettings(verify_bundle="off")
    prepare_live(Gained(2.0), cache=off)
    served = prepare_live(Gained(3.0), cache=off, shadow=EACH)
    assert served.prepared.compiled.from_bundle
    served.prepared.capture()
    assert run(served, 3)
    assert the_wrong_step(served.prepared).out_of_service == Cause.BUNDLE
    again = prepare_live(Gained(3.0), cache=off)
    assert not again.prepared.compiled.from_bundle
    assert run(again, 3)


def other_gain(served):
    served.model.gain = 3.0


def other_weight(served):
    layer: Any = served.model.layers[0]
    layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)


@pytest.mark.parametrize("change", [other_gain, other_weight])
def test_a_bundle_is_not_blamed_for_a_model_that_changed_since(prepare_live, monkeypatch, change):
    """The next start may find it right. Checks in turn come to the change later."""
    monkeypatch.setattr(ModelCheck, "check_step", lambda *_: None)
    monkeypatch.setattr(Snapshot, "check_all", lambda *_: None)
    off = CacheSettings(verify_bundle="off")
    prepare_live(Gained(2.0), cache=off)
    as_a_gpu = {"fail_on_moved_inputs": False}
    served = prepare_live(Gained(2.0), replay=as_a_gpu, cache=off, shadow=EACH).capture()
    change(served)
    assert run(served, 3)
    wrong = the_wrong_step(served.prepared)
    assert wrong.out_of_service == Cause.CODE
    assert wrong.changed
    again = prepare_live(Gained(2.0), cache=off)
    assert again.prepared.compiled.from_bundle
    assert run(again, 3)


def test_a_wrong_bundle_that_was_compiled_beside_steps_is_put_aside(serve_cold, monkeypatch):
    compiled_wrong(monkeypatch)
    served = serve_cold(shadow=EACH).capture()
    served.prepared.parts.starts.wait_until_compiled()
    assert served.prepared.compiled.bundle is not None
    assert run(served, 3)
    assert the_wrong_step(served.prepared).out_of_service == Cause.BUNDLE
    assert not serve_cold().prepared.compiled.traced


def test_padding_that_leaks_takes_all_graphs_out(prepare_live, monkeypatch):
    monkeypatch.setattr(assemble.row_mixing, "known_mixed_rows", lambda *_, **__: [])
    served = prepare_live(MixesRows(), shadow=EACH).capture()
    assert run(served, 3)
    wrong = the_wrong_step(served.prepared)
    assert wrong.out_of_service == Cause.GRAPHS
    assert served.prepared.recordings() == []
    assert run(served, 3)
    assert len(served.prepared.records.of(WrongStep)) == 1


def as_decode(served):
    """Rows count as requests of one token, which FULL graphs serve."""
    served.batch = lambda *lengths: Batch(sum(lengths), sum(lengths), True, 1)


@pytest.mark.parametrize("constant", ["starts", "gain"])
def test_a_wrong_graph_constant_takes_the_graphs_of_the_mode_out(serve, monkeypatch, constant):
    """A table that moved, which is MovedTensor if it is not stated to be constant, or a number."""
    served = serve(shadow=EACH)
    monkeypatch.setattr(type(served.stage), "graph_constants", (constant,), raising=False)
    as_decode(served)
    served.prepared.capture()
    assert run(served, 2, 1)
    changed = {"starts": served.stage.starts.clone(), "gain": 2.0}
    setattr(served.stage, constant, changed[constant])  # graphs have the first one
    assert run(served, 1, 2)
    wrong = the_wrong_step(served.prepared)
    assert (wrong.mode, wrong.out_of_service) == ("FULL", Cause.MODE)
    assert {recording.name[:4] for _, recording in served.prepared.recordings()} == {"PIEC"}
    assert run(served, 3)
    assert len(served.prepared.records.of(WrongStep)) == 1


def test_a_step_that_waits_is_proved_when_the_engine_is_idle(prepare_live):
    served = prepare_live(shadow=EACH).capture()
    assert served.prepared.parts.proof.idle() is False
    assert run(served, 3)
    assert served.prepared.report()["shadow"]["proved"] == []
    assert run(served, 2, 2)  # meanwhile: another batch, other starts
    starts = served.stage.starts.clone()
    assert served.prepared.parts.proof.idle() is True
    assert torch.equal(served.stage.starts, starts)
    assert len(served.prepared.report()["shadow"]["proved"]) == 1
    assert served.prepared.records.of(WrongStep) == []
    run(served, 3)
    served.stage.starts = starts
    assert served.prepared.parts.proof.idle() is False
    assert served.prepared.report()["shadow"]["skipped"]["state was replaced"] == 1


@pytest.fixture
def prepare_behind(prepare_live, attend_op, temporary_op):
    """The model behind an op with the kernel that is given."""

    def prepare_behind(kernel):
        name, schema = f"live_tests::{kernel.__name__}", "(Tensor x, Tensor(a!) out) -> ()"
        splitting_ops = attend_op, temporary_op(name, schema, kernel)
        call = getattr(torch.ops.live_tests, kernel.__name__)

        class Behind(Model):
            def forward(self, x):
                out = torch.empty_like(x)
                call(x, out)
                return super().forward(out)

        return prepare_live(Behind(), shadow=EACH, splitting_ops=splitting_ops)

    return prepare_behind


def test_memory_that_is_not_known_as_state_is_never_written(prepare_behind):
    hidden = torch.zeros(1)

    def count(x, out):
        hidden.add_(1)
        out.copy_(x)

    served = prepare_behind(count).capture()
    before = hidden.clone()
    served.prepared(torch.ones(3, HIDDEN), batch=Batch(3, 1))
    assert hidden == before + 1
    (stopped,) = served.prepared.records.of(ShadowStopped)
    assert stopped.reason == Stopped.UNDECLARED
    assert stopped.detail == "aten::add_ [1]"


def test_each_view_of_one_memory_is_state(prepare_behind):
    """One was restored before each run of a proof; in the others each run added once more."""

    def add(x, out):
        for view in get_forward_context().layers["stage"].views:
            view.add_(x[0, 0])
        out.copy_(x)

    served = prepare_behind(add)
    served.stage.views = torch.zeros(3, 1).unbind()
    served.prepared.capture()
    served.stage.views[0]._base.zero_()
    for _ in range(2):
        served.prepared(torch.ones(3, HIDDEN), batch=Batch(3, 1))
    assert [view.item() for view in served.stage.views] == [2, 2, 2]
    facts = served.prepared.report()["shadow"]
    assert (facts["wrong"], facts["stopped"], facts["skipped"]) == ([], None, {})


def test_rows_of_large_state_that_are_not_kept_are_written_once(prepare_behind):
    """Each run of a proof added to them. Their number is in no input and no metadata."""

    def add_elsewhere(x, out):
        get_forward_context().layers["stage"].large[100] += x[0, 0]
        out.copy_(x)

    served = prepare_behind(add_elsewhere)
    served.stage.large = torch.zeros(1 << 20, 5)
    served.prepared.capture()
    served.stage.large.zero_()
    for _ in range(2):
        served.prepared(torch.ones(3, HIDDEN), batch=Batch(3, 1))
    assert served.stage.large[100].tolist() == [2] * 5
    (stopped,) = served.prepared.records.of(ShadowStopped)
    assert stopped.reason == Stopped.OTHER_ROWS
    assert stopped.detail == "rows [100] of dimension 0 of [1048576, 5]"


def test_a_proof_that_fails_on_metadata_with_padding_says_how_to_state_it(temporary_op):
    def scale(x, out):
        out.copy_(x * get_forward_context().metadata)

    op = temporary_op("live_tests::scale", "(Tensor x, Tensor(a!) out) -> ()", scale)

    def forward(x):
        out = torch.empty_like(x)
        torch.ops.live_tests.scale(x, out)
        return out + 1

    padded, settings = torch.ones(4, 1), {"capture_sizes": (4,), "shadow": EACH}
    prepared = captured(
        Computes(forward), metadata_for=lambda *_: padded, splitting_ops=(op,), **settings
    )
    decision = prepared.dispatch(Batch(3, 1))
    assert prepared.run(decision, torch.ones(3, 4), metadata=padded).sum() == 3 * 4 * 2
    assert "state by `prove_with`" in prepared.report()["shadow"]["stopped"]
    prepared.close()


def test_a_proof_sees_python_as_the_step_did_and_leaves_it_so(prepare_behind):
    def alternate(x, out):
        stage = get_forward_context().layers["stage"]
        stage.turns = [*getattr(stage, "turns", ()), len(x)]
        out.copy_(x * len(stage.turns))

    served = prepare_behind(alternate).capture()
    served.stage.turns = []
    for _ in range(3):
        served.prepared(torch.ones(2, HIDDEN), batch=Batch(2, 1))
    assert len(served.stage.turns) == 3
    facts = served.prepared.report()["shadow"]
    assert (facts["wrong"], facts["stopped"]) == ([], None)
    # the first step that writes an attribute may have set it up
    assert sum(row["proved"] for row in facts["graphs"]) == 2
    served.prepared.shadow_idle()
    for _ in range(2):  # the first of them is proved after the second
        served.prepared(torch.ones(2, HIDDEN), batch=Batch(2, 1))
    assert served.prepared.shadow_idle()
    assert len(served.stage.turns) == 5
    assert served.prepared.report()["shadow"]["wrong"] == []


class Decoder(torch.nn.Module):
    """Writes each row to its slot; a result has what the slot had before."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.requires_grad_(False)
        self.register_buffer("kv", torch.zeros(64, 8))

    def forward(self, x, slots):
        before = self.kv[slots]
        rows = self.linear(x)
        self.kv.index_copy_(0, slots, rows)
        return rows + before


class Attending(Decoder):
    """The op has a dropout, of 0 here."""

    def forward(self, x, slots):
        each = super().forward(x, slots)[:, None, None]
        return torch.nn.functional.scaled_dot_product_attention(each, each, each)[:, 0, 0]


class Drawing(Decoder):
    def forward(self, x, slots):
        return super().forward(x, slots) + 0 * torch.rand_like(x)


DUMP = 63


@pytest.fixture
def prepare_decoder():
    """A decoder under a compiler whose code runs on `spoiled(arguments)`, every step proved."""

    def prepare_decoder(spoiled=list, model=None, **settings):
        def compiler(graph, inputs):
            return lambda *args: graph(*spoiled(list(args)))

        _COMPILER_FNS.pop("planted", None)
        register_backend(compiler, name="planted")
        config = small_config(
            16, inputs={"x": "float32[num_tokens, 8]", "slots": "int64[num_tokens]"},
            capture_sizes=(4,), compiler="planted", steps={"padding": {"slots": DUMP}}, shadow=EACH,
        )  # fmt: skip
        prepared = prepare(model or Decoder(), config.changed(**settings))
        prepared.capture()
        return prepared

    yield prepare_decoder
    _COMPILER_FNS.pop("planted", None)


def decode(prepared, size=3):
    batch = Batch(size, size, is_decode=True, query_len=1)
    rows: torch.Tensor = prepared(torch.ones(size, 8), torch.arange(size), batch=batch)
    return rows


def is_cache(value):
    return isinstance(value, torch.Tensor) and value.shape == (64, 8)


def test_a_compiler_that_loses_writes_is_found_and_counted(prepare_decoder):
    prepared = prepare_decoder(lambda args: [x.clone() if is_cache(x) else x for x in args])
    first, second = decode(prepared).clone(), decode(prepared)
    assert torch.equal(second, 2 * first)
    assert the_wrong_step(prepared).out_of_service == Cause.CODE
    assert prepared.compiled.model.kv[:3].any(1).all()
    prometheus = pytest.importorskip("piecegraph.tools.integrations.prometheus")
    line = 'piecegraph_wrong_steps_total{out_of_service="compiled code"} 1.0'
    assert line in prometheus.metrics_text(prepared)


@pytest.mark.parametrize("model", [Attending, Drawing])
def test_an_op_that_may_draw_random_numbers_is_proved_unless_it_does(prepare_decoder, model):
    prepared = prepare_decoder(model=model())
    decode(prepared)
    stopped = [each.reason for each in prepared.records.of(ShadowStopped)]
    assert stopped == ([Stopped.RANDOM] if model is Drawing else [])
    assert len(prepared.report()["shadow"]["proved"]) == (model is Attending)


def test_writes_of_padding_are_no_fault(prepare_decoder):
    prepared = prepare_decoder()
    decode(prepared)
    assert prepared.compiled.model.kv[DUMP].any()  # by the step, and not by the model on real rows
    assert prepared.records.of(WrongStep) == []
    assert prepared.report()["shadow"]["proved"] == [{"mode": "FULL", "num_tokens": 4, "count": 1}]


def test_padding_that_writes_what_was_there_but_for_rounding_is_no_fault(prepare_decoder):
    def rounded(args):
        return [x * (1 + 2**-22) if x.shape == (8,) else x for x in args]

    prepared = prepare_decoder(rounded)
    kv, bias = prepared.compiled.model.kv, prepared.compiled.model.linear.bias
    kv[DUMP] = bias  # what the model writes for padding
    decode(prepared)
    assert not torch.equal(kv[DUMP], bias)
    assert prepared.records.of(WrongStep) == []


def test_a_write_to_another_slot_is_found(prepare_decoder):
    def stray(args):
        for cache in filter(is_cache, args):
            cache[40] += 1
        return args

    prepared = prepare_decoder(stray)
    prepared.compiled.model.kv[40] = 0
    decode(prepared)
    assert the_wrong_step(prepared).out_of_service == Cause.CODE
    assert not prepared.compiled.model.kv[40].any()
    (wrong,) = prepared.report()["shadow"]["wrong"]
    assert wrong["difference"] is None
    json.dumps(wrong, allow_nan=False)


def test_without_compiling_steps_are_proved_too(prepare_decoder):
    prepared = prepare_decoder(compile=False)
    decode(prepared)
    decode(prepared, 7)  # without a graph it is the model itself
    facts = prepared.report()["shadow"]
    assert [row["num_tokens"] for row in facts["proved"]] == [4]
    assert (facts["wrong"], facts["stopped"]) == ([], None)


def test_the_saved_step_of_a_long_prompt_can_be_replayed(prepare_decoder):
    prepared = prepare_decoder(
        lambda args: [x * 2 if x.shape == (8,) else x for x in args], max_num_reqs=4
    )
    prepared(torch.ones(12, 8), torch.arange(12), batch=Batch(12, 2))
    (step,) = load_steps(the_wrong_step(prepared).file)
    assert prepared.dispatch(step.batch).mode is RuntimeMode.NONE


def test_a_waiting_step_is_compared_with_what_it_wrote_itself(prepare_decoder):
    prepared = prepare_decoder()
    prepared.parts.proof.idle()
    decode(prepared)
    decode(prepared)  # the same slots again
    written = prepared.compiled.model.kv.clone()
    assert prepared.parts.proof.idle() is True
    assert torch.equal(prepared.compiled.model.kv, written)
    assert prepared.records.of(WrongStep) == []
    lost = prepare_decoder(lambda args: [x.clone() if is_cache(x) else x for x in args])
    lost.parts.proof.idle()
    decode(lost)
    lost.compiled.model.kv[:3] = 5.0  # a later step, which wrote
    lost.parts.proof.idle()
    assert len(lost.records.of(WrongStep)) == 1


class Restless(Decoder):
    """Gives another result each time, as long as `warms_up`."""

    warms_up = True
    calls = count()  # no proof sets it back

    def forward(self, x, slots):
        calls = next(self.calls)
        return super().forward(x, slots) + (calls if self.warms_up else 0)


@pytest.mark.parametrize("warm_up", [3, 12])
def test_steps_that_cannot_be_compared_in_the_beginning(prepare_decoder, monkeypatch, warm_up):
    monkeypatch.setattr(assemble.row_mixing, "known_mixed_rows", lambda *_, **__: [])
    prepared = prepare_decoder(model=Restless(), compile=False)
    for _ in range(warm_up):
        decode(prepared)
    prepared.compiled.model.warms_up = False
    prepared.release()
    prepared.capture()
    decode(prepared)
    facts = prepared.report()["shadow"]
    assert facts["wrong"] == []
    if warm_up == 3:
        assert facts["stopped"] is None
        assert [row["count"] for row in facts["proved"]] == [1]
    else:
        assert facts["stopped"].startswith(Stopped.UNSTEADY)
        assert facts["proved"] == []


def test_one_wrong_graph_is_out_of_service_alone(serve):
    served = serve(shadow=EACH)
    as_decode(served)
    served.prepared.capture()
    installed = filter(None, served.prepared._core.graphs.installed)
    graph = next(each for each in installed if each.recording.name == "FULL 4")
    replay = graph.replay
    graph.replay = lambda *args: [one + 1 for one in replay(*args)]
    assert run(served, 2, 1)
    assert the_wrong_step(served.prepared).out_of_service == Cause.GRAPH
    assert the_wrong_step(served.prepared).graphs == ["FULL 4"]
    assert "FULL 8" in {recording.name for _, recording in served.prepared.recordings()}
    assert run(served, 2, 1)
    assert served.check(served.batch(2, 1)) == "FULL 8"


def test_proofs_beyond_their_share_of_the_time_are_skipped(prepare_decoder):
    prepared = prepare_decoder(shadow={"every": 1, "share": 1e-9})
    for _ in range(3):
        decode(prepared)
    facts = prepared.report()["shadow"]
    assert sum(row["count"] for row in facts["proved"]) == 1
    assert facts["skipped"] == {"budget": 2}


def test_each_graph_is_proved_at_its_first_steps_then_one_step_in_many(prepare_decoder):
    prepared = prepare_decoder(capture_sizes=(2, 4, 8), shadow={"every": 50, "share": 1.0})
    for _ in range(20):
        for size in (2, 4):
            decode(prepared, size)
    graphs = {row["num_tokens"]: row for row in prepared.report()["shadow"]["graphs"]}
    assert [graphs[size]["proved"] for size in (2, 4, 8)] == [1, 1, 0]
    assert [graphs[size]["last_step"] for size in (2, 4, 8)] == [1, 2, None]
    assert graphs[8]["not_yet"] == "no step"
    decode(prepared, 7)  # the one that is behind comes before the others' turn
    for _ in range(60):
        decode(prepared, 4)
    graphs = {row["num_tokens"]: row for row in prepared.report()["shadow"]["graphs"]}
    assert [graphs[size]["proved"] for size in (2, 4, 8)] == [1, 2, 1]
    prepared.release()
    prepared.capture()
    assert not any(row["proved"] for row in prepared.report()["shadow"]["graphs"])
    decode(prepared, 2)
    assert prepared.report()["shadow"]["graphs"][-1]["proved"] == 1


@pytest.mark.parametrize(
    ("steps", "strategy"),
    [
        (250, "lazy"),
        *(pytest.param(8000, s, marks=pytest.mark.heavy) for s in ("eager", "delayed", "lazy")),
    ],
)
def test_each_graph_is_proved_by_its_tenth_step(serve, steps, strategy):
    """Whatever the share: it holds for what comes after these proofs."""
    draw = torch.Generator().manual_seed(0)
    for mode in (GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE):
        served = serve(
            sizes=(1, 2, 4, 8, 16), mode=mode, strategy=strategy,
            shadow={"every": 50, "share": 1e-9},
        )  # fmt: skip
        served.prepared.capture()
        for size in torch.randint(1, 17, (steps,), generator=draw).tolist():
            assert run(served, *((1,) * size if size % 3 else (size,)))
        facts = served.prepared.report()["shadow"]
        assert (facts["wrong"], facts["stopped"]) == ([], None)
        graphs = [row for row in facts["graphs"] if row["steps"] >= 10]
        assert len(graphs) >= 4
        assert [row["proved"] for row in graphs] == [1] * len(graphs), facts
        assert facts["skipped"]["budget"] >= 9 * (len(graphs) - 1)
        assert 0 < facts["overdue_seconds"] < facts["seconds"]


def test_a_graph_is_proved_by_its_tenth_step_even_while_no_time_is_idle(serve):
    served = serve(sizes=(2, 8), shadow={"every": 1000, "share": 1.0}).capture()
    served.prepared.shadow_idle()
    assert all(run(served, 1, 1) for _ in range(10))  # the first of them waits
    assert all(run(served, 5) for _ in range(10))
    proved = [row["proved"] for row in served.prepared.report()["shadow"]["graphs"] if row["steps"]]
    assert proved == [1, 1]
    assert served.prepared.shadow_idle()


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_no_fault_in_5000_steps(dtype):
    """Twelve residual layers and a softmax under Inductor, which leaves roundings out."""

    class Residual(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(12))
            self.register_buffer("kv", torch.zeros(256, 32))

        def forward(self, x, slots):
            for layer in self.layers:
                normed = torch.nn.functional.rms_norm(x, (32,))
                x = x + torch.nn.functional.gelu(layer(normed)) * 4
            before = self.kv[slots]
            self.kv.index_copy_(0, slots, x)
            return (x + before).softmax(-1) * 100

    torch.manual_seed(0)
    model = Residual().to(getattr(torch, dtype)).requires_grad_(False)
    inputs = {"x": f"{dtype}[num_tokens, 32]", "slots": "int64[num_tokens]"}
    settings = {"steps": {"padding": {"slots": 255}}, "shadow": EACH, "compiler": "inductor"}
    prepared = captured(
        model, 64, ReplayBackend(), inputs=inputs, capture_sizes=(8, 64), **settings
    )
    for step in range(5000):
        size = step % 64 + 1
        batch = Batch(size, size, is_decode=True, query_len=1)
        x = torch.randn(size, 32).to(getattr(torch, dtype))
        prepared(x, torch.randperm(255)[:size], batch=batch)
    assert prepared.records.of(WrongStep) == []
    assert sum(row["count"] for row in prepared.report()["shadow"]["proved"]) == 5000
    prepared.close()
