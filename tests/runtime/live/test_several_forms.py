"""Several call forms of one model: ids or embeddings, with and without further tensors."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph import Axis, Batch, Config, prepare
from piecegraph.cache import Cache
from piecegraph.cache.inspection import manifests
from piecegraph.compile.ir.compilation import CompileRequest
from piecegraph.compile.verify import trace_difference
from piecegraph.config import compile_config
from piecegraph.errors import (
    ArgumentFixed,
    CallFormUnknown,
    InputsShareMemory,
    InvalidSetting,
    MovedTensor,
    SizeOutOfRange,
)
from piecegraph.events import Events
from piecegraph.runtime.core.records import WrongStep
from piecegraph.tools.bisect import BisectCase, bisect
from piecegraph.tools.steps import StepRecorder, load_steps

from ..conftest import strict_backend

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("one_cache", "mix_op")]

HIDDEN, LAYERS, MOST = 4, 3, 16
ROWS = f"float32[num_tokens, {HIDDEN}]"
IDS = {"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"}
EMBEDS = {"input_ids": None, "positions": "int64[num_tokens]", "inputs_embeds": ROWS}
DEEPSTACK = {**EMBEDS, "deepstack.0": ROWS, "deepstack.1": ROWS}
FORMS = (IDS, EMBEDS, DEEPSTACK)


class Decoder(nn.Module):
    """`gate` is for embeddings alone; deepstack rows are added after the first layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, HIDDEN)
        self.gate = nn.Parameter(torch.rand(HIDDEN))
        self.layers = nn.ParameterList(torch.rand(HIDDEN) for _ in range(LAYERS))
        self.requires_grad_(False)

    def forward(self, input_ids, positions, inputs_embeds=None, deepstack=None):
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds * self.gate
        x = x + positions[:, None]
        for number, weight in enumerate(self.layers):
            y = (x * weight).sin()
            out = torch.empty_like(y)
            torch.ops.live_tests.mix(y, out)
            x = x + out
            if deepstack is not None and number < len(deepstack):
                x = x + deepstack[number]
        return x


def served(model=None, **settings):
    given: dict[str, Any] = {
        "inputs": FORMS,
        "splitting_ops": ("live_tests::mix",),
        "max_num_tokens": MOST,
        "max_num_reqs": MOST,
        "compiler": "texts",
        "capture_sizes": (2, 4, 8),
        "attention": {"support": "ALWAYS"},
        "graph_mode": "FULL_AND_PIECEWISE",
    }
    return prepare(model or Decoder(), Config(**{**given, **settings}), backend=strict_backend())


def call(form, num_tokens):
    ids = torch.randint(32, (num_tokens,))
    arguments: dict[str, Any] = {"input_ids": ids, "positions": torch.arange(num_tokens)}
    if form:
        arguments |= {"input_ids": None, "inputs_embeds": torch.randn(num_tokens, HIDDEN)}
    if form == 2:
        arguments["deepstack"] = [torch.randn(num_tokens, HIDDEN) for _ in range(2)]
    return arguments


def batch(num_tokens, decode=False, **facts):
    of_decode = {"is_decode": True, "query_len": 1} if decode else {}
    return Batch(num_tokens, num_tokens if decode else 1, **of_decode, **facts)


def step(prepared, form, num_tokens, decode=False, within=0):
    """One step that must equal the model, bit for bit by default; how it ran."""
    arguments, decisions = call(form, num_tokens), list[Any]()
    result = prepared(**arguments, batch=batch(num_tokens, decode), metadata=decisions.append)
    expected = prepared.compiled.model(**arguments)
    torch.testing.assert_close(result, expected, rtol=within, atol=within)
    return f"{decisions[0].mode.name} {decisions[0].descriptor.form}"


def graphs(prepared):
    entries = [prepared.dispatcher.plan.entries[index] for index, _ in prepared.recordings()]
    return Counter(f"{entry.mode.name} {entry.descriptor.form}" for entry in entries)


@pytest.mark.parametrize("compiles", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_a_thousand_mixed_steps_are_right(compiles):
    settings = {} if compiles else {"compile": False, "graph_mode": "FULL"}
    prepared = served(**settings, steps={"after_seal": "raise"})
    digests = [{piece.digest for piece in form.plan.pieces} for form in prepared.compiled.forms()]
    pieces = prepared.report()["pieces"]
    assert pieces["unique"] == len(set.union(*digests)) < sum(map(len, digests)) or not compiles
    assert pieces["total"] == (3 * (LAYERS + 1) if compiles else 3)
    assert not prepared.compiled.relies_on("nowhere")
    prepared.capture()
    prepared.seal()
    modes = ("FULL", "PIECEWISE") if compiles else ("FULL",)
    assert graphs(prepared) == {f"{mode} {form}": 3 for mode in modes for form in range(3)}
    choose = random.Random(0)
    ran = Counter(
        step(prepared, choose.randrange(3), choose.randint(1, 10), decode=choose.random() < 0.5)
        for _ in range(1000)
    )
    assert {*ran} == {f"{mode} {form}" for mode in ("NONE", *modes) for form in range(3)}
    assert sum(row["count"] for row in prepared.report()["dispatch"]) == 1000


def test_a_call_of_no_form_lists_the_forms():
    prepared = served(graph_mode="NONE")
    wrong = call(1, 3) | {"input_ids": torch.arange(3)}
    named = "has input_ids, positions, inputs_embeds, which is"
    with pytest.raises(CallFormUnknown, match=named) as e:
        prepared(**wrong, batch=batch(3))
    assert "0: input_ids, positions; 1: " in str(e.value)
    assert "2: inputs_embeds, positions, deepstack.0, deepstack.1" in str(e.value)
    with pytest.raises(CallFormUnknown, match="has positions, which"):
        prepared(None, torch.arange(3), batch=batch(3))
    longer = call(2, 3)
    longer["deepstack"].append(torch.randn(3, HIDDEN))
    with pytest.raises(CallFormUnknown):
        prepared(**longer, batch=batch(3))
    with pytest.raises(SizeOutOfRange):  # of the form that the call has
        prepared(**call(1, MOST + 1), batch=batch(MOST + 1))
    with pytest.raises(ArgumentFixed):  # one form: as ever
        served(inputs=IDS, graph_mode="NONE")(**wrong, batch=batch(3))
    longer |= {"input_ids": torch.arange(3), "inputs_embeds": None}
    with pytest.raises(ArgumentFixed, match="'deepstack' is an object of class list, but"):
        served(inputs=IDS, graph_mode="NONE")(**longer, batch=batch(3))


def test_a_graph_serves_its_own_form_alone():
    axes = [Axis("form", (1,))]
    prepared = served(variants={"axes": axes})
    prepared.capture()
    assert graphs(prepared) == {"FULL 1": 3, "PIECEWISE 1": 3}
    assert [step(prepared, form, 3) for form in range(3)] == ["NONE 0", "PIECEWISE 1", "NONE 2"]
    decision = prepared.dispatch(batch(3, axes={"form": 1}))
    with pytest.raises(CallFormUnknown, match="is of form 0, and the batch states form 1"):
        prepared.run(decision, **call(0, 3))
    assert prepared.reads_in_place(decision) == set()
    assert "deepstack.1" in prepared.reads_in_place(prepared.dispatch(batch(9, axes={"form": 2})))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"inputs": (IDS, {**IDS, "inputs_embeds": None})}, "two call forms have the same tensors"),
        ({"inputs": (IDS, {"inputs_embeds": "float32[4]"})}, "has a dimension num_tokens"),
        ({"inputs": FORMS, "sizes": {"buckets": [(1, 2, 3)]}}, "graphs of buckets are of one"),
        (
            {"inputs": FORMS, "variants": {"axes": [Axis("form", (0, 3))]}},
            "the number of a call form",
        ),
    ],
)
def test_settings_that_no_call_could_follow_are_refused(settings, reason):
    with pytest.raises(InvalidSetting, match=reason):
        Config(graph_mode="FULL", **settings)


def test_examples_are_of_one_form():
    with pytest.raises(InvalidSetting, match="examples of several forms"):
        prepare(Decoder(), Config(inputs=FORMS), examples=((), call(0, 3)))


def test_weights_of_one_form_are_followed():
    prepared = served()
    prepared.capture()
    model = prepared.compiled.model
    model.gate = nn.Parameter(torch.rand(HIDDEN), requires_grad=False)
    prepared.refresh()
    assert all(step(prepared, form, size) for form in range(3) for size in (3, 9))


def test_graphs_of_all_forms_are_warmed_up_and_return():
    prepared = served(strategy="lazy")
    assert prepared.memory_plan().largest_step >= 0
    prepared.warm_up()
    for form in range(3):
        step(prepared, form, 2, decode=True)
        step(prepared, form, 3)
    before = graphs(prepared)
    assert {*before} == {f"{mode} {form}" for mode in ("FULL", "PIECEWISE") for form in range(3)}
    prepared.release(keep="plan")
    assert not prepared.recordings()
    while prepared.capture_idle(1e9):
        pass
    assert graphs(prepared) == before
    assert step(prepared, 2, 2, decode=True) == "FULL 2"


def test_the_engine_writes_inputs_of_one_form_in_place():
    buffer, model = torch.zeros(MOST, HIDDEN), Decoder()
    config = served(model).config
    prepared = prepare(
        model, config, backend=strict_backend(), input_buffers={"inputs_embeds": buffer}
    )
    prepared.capture()
    assert step(prepared, 0, 3) == "PIECEWISE 0"
    arguments = call(1, 3) | {"inputs_embeds": buffer[:3].normal_()}
    assert torch.equal(prepared(**arguments, batch=batch(3)), model(**arguments))


class Writing(Decoder):
    """With deepstack it also writes to its embeddings."""

    def forward(self, input_ids, positions, inputs_embeds=None, deepstack=None):
        result = super().forward(input_ids, positions, inputs_embeds, deepstack)
        if deepstack is not None:
            inputs_embeds.add_(1)
        return result


def test_an_input_that_one_form_writes_to_may_share_no_memory():
    prepared = served(Writing())
    prepared.capture()
    for size in (3, 9):
        shared = call(2, size)
        shared["deepstack"][1] = shared["inputs_embeds"]
        with pytest.raises(InputsShareMemory, match="deepstack"):
            prepared(**shared, batch=batch(size))
        arguments = call(1, size)
        expected = prepared.compiled.model(**arguments)
        assert torch.equal(prepared(**arguments, batch=batch(size)), expected)


def test_a_wrong_graph_of_one_form_leaves_service_alone(tmp_path):
    prepared = served(shadow={"every": 1, "share": 1.0}, codegen={"dump_dir": tmp_path})
    prepared.prove_with(lambda metadata, decision: metadata, lambda kept, decision: kept)
    prepared.capture()
    decision = prepared.dispatch(batch(2, decode=True, axes={"form": 1}))
    dict(prepared.recordings())[decision.graph_index].outputs[0].add_(1)
    graph = prepared._core.graphs.installed[decision.graph_index]
    replay = graph.replay

    def wrong(*step):
        return [result + 1 for result in replay(*step)]

    object.__setattr__(graph, "replay", wrong)
    for form in range(3):  # the step has the right numbers
        step(prepared, form, 2, decode=True)
    (found,) = prepared.records.of(WrongStep)
    assert found.out_of_service == "graph"
    all_graphs = {f"{mode} {form}": 3 for mode in ("FULL", "PIECEWISE") for form in range(3)}
    assert graphs(prepared) == {**all_graphs, "FULL 1": 2}
    (recorded,) = load_steps(found.file)
    assert recorded.batch.axes == {"form": 1}


def test_bisect_takes_the_steps_of_one_form(tmp_path):
    prepared = served()
    prepared.capture()
    with StepRecorder(prepared, None) as recorder:
        step(prepared, 1, 3)
        step(prepared, 1, 2, decode=True)
        step(prepared, 0, 2)
    case = BisectCase(prepared.compiled.model, prepared.config, recorder.steps[:2])
    assert bisect(case) is None
    with pytest.raises(InvalidSetting, match="a search is for one call form"):
        bisect(replace(case, steps=recorder.steps))


def test_verification_compares_each_form(tmp_path):
    prepared = served(graph_mode="NONE")
    config = compile_config(prepared.config)
    request = CompileRequest(
        Decoder(), config, Cache(None, Events()), Events(), torch.device("cpu")
    )
    plan = prepared.compiled.plan
    assert trace_difference(request, plan) is None
    assert "result * 2" in str(trace_difference(replace(request, model=Scaled()), plan))
    two = replace(request, config=replace(config, inputs=FORMS[:2]))
    assert trace_difference(two, plan) == "it has 3 traces, the model has 2 now"


class Scaled(Decoder):
    """Another model, with deepstack alone."""

    def forward(self, input_ids, positions, inputs_embeds=None, deepstack=None):
        result = super().forward(input_ids, positions, inputs_embeds, deepstack)
        return result if deepstack is None else result * 2


class Branching(Decoder):
    """Of embeddings alone it has other code for one token, and for more than eight."""

    def forward(self, input_ids, positions, inputs_embeds=None, deepstack=None):
        if inputs_embeds is not None:
            rows = positions.shape[0]
            inputs_embeds = inputs_embeds * (3 if rows > 8 else 2)
        return super().forward(input_ids, positions, inputs_embeds, deepstack)


@pytest.mark.heavy
def test_all_forms_are_served_uncompiled_until_their_code_is_there(tmp_path):
    prepared = served(cache_dir=tmp_path, bundle="serve", compiler="inductor")
    prepared.capture()
    assert not prepared.compiled.traced
    assert {step(prepared, form, 3) for form in range(3)} == {"NONE 0", "NONE 1", "NONE 2"}
    prepared.wait_until_compiled()
    modes = {step(prepared, form, 3, within=1e-5) for form in range(3)}
    assert modes == {"PIECEWISE 0", "PIECEWISE 1", "PIECEWISE 2"}


class Single(Decoder):
    """With embeddings it branches on one token, and computes the same."""

    def forward(self, input_ids, positions, inputs_embeds=None, deepstack=None):
        if inputs_embeds is not None and positions.shape[0] == 1:
            inputs_embeds = inputs_embeds + 0 * inputs_embeds
        return super().forward(input_ids, positions, inputs_embeds, deepstack)


def test_each_form_has_the_traces_that_its_guards_need():
    ways = ((Branching(), {"tracing": {"guards": "split"}}), (Single(), {}))
    for model, settings in (*ways, (Single(), {"graph_mode": "NONE"})):
        prepared = served(model, **settings)
        counts = [len(form.traces()) for form in prepared.compiled.forms()]
        assert counts == [1, 2, 2]
        prepared.capture()
        for form, size in itertools.product(range(3), (1, 3, 8, 9, 16)):
            step(prepared, form, size)


def test_the_next_start_loads_all_forms_from_one_bundle(tmp_path, monkeypatch):
    monkeypatch.delenv("PIECEGRAPH_OFF", raising=False)

    def start():
        prepared = served(cache_dir=tmp_path)
        counters = prepared.report()["counters"]
        prepared.capture()
        prepared.seal()
        for number in range(60):
            step(prepared, number % 3, number % 10 + 1, decode=number % 2 == 0)
        prepared.wait_until_verified()
        prepared.close()
        return prepared, counters

    (first, cold), (second, warm) = start(), start()
    pieces = first.report()["pieces"]
    assert pieces["total"] == 3 * (LAYERS + 1) > pieces["unique"] + LAYERS
    assert len([*manifests(tmp_path, "bundle")]) == 1
    assert len([*manifests(tmp_path, "artifact")]) == pieces["unique"]
    assert (cold["dynamo_traces"], warm["dynamo_traces"]) == (3, 0)
    assert (first.compiled.from_bundle, second.compiled.from_bundle) == (False, True)
    assert second.report()["cache"]["verified"] is True


@pytest.mark.parametrize("late", [False, True])
def test_a_replaced_weight_that_one_form_alone_reads_is_an_error(late):
    prepared = served(strategy="lazy") if late else served()
    prepared.capture()
    prepared.compiled.model.gate = nn.Parameter(torch.rand(HIDDEN), requires_grad=False)
    with pytest.raises(MovedTensor, match="gate"):
        step(prepared, 1, 2)
