"""What a step returns, what it reports, and what is left after the model was closed."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from piecegraph import Batch, Config, RuntimeMode, prepare
from piecegraph.errors import (
    AutocastActive,
    BatchInvalid,
    BatchMismatch,
    ModeActive,
    ReturnedUnread,
)
from piecegraph.runtime.capture import installed_graph

from ..conftest import Computes, captured

DECODE = Batch(2, 2, is_decode=True, query_len=1)


def ready(serve, **settings):
    return serve(**settings).capture()


def run(served, lengths=(1, 1)):
    """One step; its result and a copy of what it should be."""
    x = torch.randn(sum(lengths), 4)
    served.stage.starts.copy_(torch.arange(16))
    expected = served.expected(x)
    return served.prepared(x, batch=served.batch(*lengths)), expected


CHANGES = [
    lambda result: result.t_(),
    lambda result: result.unsqueeze_(0),
    lambda result: result.requires_grad_(),
    lambda result: setattr(result, "data", torch.zeros(3)),
    lambda result: result.resize_(1),
    lambda result: result.add_(1),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lengths", [(1, 1), (2, 1)])
def test_nothing_that_a_caller_does_to_a_result_changes_later_steps(serve, change, lengths):
    served = ready(serve)
    change(run(served, lengths)[0])
    for _ in range(2):
        result, expected = run(served, lengths)
        assert torch.equal(result, expected)
        assert not result.requires_grad


class Passing(nn.Module):
    """Returns arguments of which the graph reads one."""

    def forward(self, x, ids, table):
        return {"ids": ids, "own": x * 2, "given": (table, x)}


INPUTS = {"x": "float32[num_tokens, 4]", "ids": "int64[num_tokens]", "table": "float32[2, 3]"}


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_arguments_that_are_only_returned_are_the_callers_own(mode):
    prepared = captured(Passing(), inputs=INPUTS, graph_mode=mode)
    for size in (3, 8, 3):
        x, ids, table = torch.randn(size, 4), torch.arange(size), torch.randn(3, 2).t()
        result = prepared(x, ids, table, batch=Batch(size, 1))
        assert result["ids"] is ids
        assert result["given"][0] is table
        assert result["given"][1] is x
        assert torch.equal(result["own"], x * 2)


def test_a_result_that_is_passed_on_and_returned_is_that_of_its_own_step():
    """What was given is returned beside what comes next, as by a draft loop of two lengths."""
    draft = Computes(lambda x: (x * 2 + 1, x))
    prepared = captured(draft, capture_sizes=(2, 4))
    got = x = torch.randn(4, 4)
    for rows in (4, 4, 2, 2):
        got, x = got[:rows], x[:rows]
        batch = Batch(rows, rows, is_decode=True, query_len=1)
        assert prepared.dispatch(batch).mode.name == "FULL"
        (got, given), (x, expected) = prepared(got, batch=batch), draft(x)
        assert torch.equal(given, expected)
        assert torch.equal(got, x)


def test_a_size_that_only_a_returned_argument_has_is_named():
    inputs = {**INPUTS, "ids": "int64[num_ids]"}
    with pytest.raises(ReturnedUnread, match="argument 'ids': no input .* dimension 0"):
        prepare(Passing(), Config(inputs=inputs, max_num_tokens=8, compiler="eager"))


def test_results_of_one_size_are_new_objects(serve):
    served = ready(serve)
    results = [run(served)[0] for _ in range(2)]
    assert results[0] is not results[1]
    assert results[0].data_ptr() == results[1].data_ptr()


@pytest.mark.parametrize("lengths", [(1, 1), (3, 1)])
def test_results_are_normal_tensors_also_if_captured_in_inference_mode(serve, lengths):
    """The second batch is PIECEWISE: its op writes what a graph made."""
    served = serve()
    with torch.inference_mode():
        served.prepared.capture()
        run(served, lengths)
    result, expected = run(served, lengths)
    assert not result.is_inference()
    assert torch.equal(result.add_(1), expected + 1)


def test_an_option_poisons_results_that_outlive_the_next_step(serve):
    for poisons in (True, False):
        served = ready(serve, options={"poison_old_results": poisons})
        first, expected = run(served, (1, 1))
        assert torch.equal(first, expected)
        second, expected = run(served, (2, 1))
        assert torch.equal(second, expected)
        assert first.isnan().all() == poisons
        third, expected = run(served, (12,))  # without a graph
        assert torch.equal(third, expected)
        assert second.isnan().all() == poisons
        run(served, (1, 1))
        assert torch.equal(third, expected)


def test_a_decision_whose_graph_was_freed_reports_the_mode_that_ran(serve):
    served = ready(serve)
    decision = served.prepared.dispatch(DECODE)
    assert decision.mode is RuntimeMode.FULL
    served.prepared.release()
    served.prepared.run(decision, torch.ones(2, 4))
    assert served.prepared.usage.rows() == [
        {"mode": "NONE", "num_tokens": 2, "count": 1, "padded_tokens": 0}
    ]
    assert served.prepared.usage.reasons() == [
        {"mode": "NONE", "reason": "not captured yet", "count": 1}
    ]
    assert served.prepared._core.steps.context.decision.mode is RuntimeMode.NONE


class AddsAtFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) + 1


class AddsAtOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) + 1


autocast = partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize(
    ("enter", "error", "name"),
    [
        (AddsAtFunctions, ModeActive, "AddsAtFunctions"),
        (AddsAtOps, ModeActive, "AddsAtOps"),
        (autocast, AutocastActive, "torch.autocast"),
    ],
)
@pytest.mark.parametrize("lengths", [(1, 1), (2, 1), (12,)])
def test_a_mode_or_autocast_around_a_step_is_refused(serve, lengths, enter, error, name):
    """Compiled code and graphs call nothing that it could see."""
    served = ready(serve)
    with enter(), pytest.raises(error, match=f"the step runs under {name}"):
        served.prepared(torch.ones(sum(lengths), 4), batch=served.batch(*lengths))
    with enter(), pytest.raises(error, match="capture"):
        served.prepared.capture()
    if error is ModeActive:
        with enter(), pytest.raises(error, match="prepare"):
            prepare(nn.Identity(), Config())
    with torch.device("cpu"), autocast(), torch.autocast("cpu", enabled=False):
        result, expected = run(served, lengths)
    assert torch.equal(result, expected)


def test_a_batch_that_states_other_tokens_than_its_inputs_have_is_refused(serve):
    served = ready(serve)
    for num_tokens in (1, 3):
        with pytest.raises(BatchMismatch, match=f"states 2 tokens, .* inputs have {num_tokens}"):
            served.prepared(torch.ones(num_tokens, 4), batch=DECODE)
    assert torch.equal(*run(served))


def test_counts_that_contradict_are_refused_cold_and_hot(serve):
    served = ready(serve)
    for _ in range(2):
        most = served.prepared.config.max_num_reqs
        wrong = (Batch(3, -1), Batch(2, 3), Batch(most + 1, most + 1))
        for batch in (*wrong, Batch(3, 3, is_decode=True, query_len=2)):
            with pytest.raises(BatchInvalid):
                served.prepared.dispatch(batch)
        served.prepared.dispatch(Batch(3, 1))
        served.prepared.dispatch(DECODE)


def test_an_idle_rank_runs_a_step_of_padding(serve):
    served = ready(serve)
    seen = []
    plan = served.prepared.dispatcher.plan
    for graph_index in (*range(len(plan.entries)), -1):
        decision = served.prepared.dispatcher.follow(graph_index, Batch(0, 0))
        assert decision.graph_index == graph_index
        seen.append(decision.descriptor)
        result = served.prepared.run(decision, torch.zeros(0, 4))
        assert result.shape == (0, 4)
    assert [d.num_tokens for d in seen[:-1]] == [e.descriptor.num_tokens for e in plan.entries]
    steps = {(row["mode"], row["num_tokens"]) for row in served.prepared.usage.rows()}
    sizes = {(entry.mode.name, entry.descriptor.num_tokens) for entry in plan.entries}
    assert steps == sizes | {("NONE", 1)}
    assert torch.equal(*run(served))


def test_an_idle_rank_calls_the_splitting_ops(serve):
    """They hold the collectives that the other ranks wait for."""
    served = ready(serve)
    for graph_index in (served.prepared.dispatch(Batch(3, 2)).graph_index, -1):
        served.stage.fault = ValueError("was called")
        decision = served.prepared.dispatcher.follow(graph_index, Batch(0, 0))
        with pytest.raises(ValueError, match="was called"):
            served.prepared.run(decision, torch.zeros(0, 4))
        served.stage.fault = None


def test_close_frees_buffers_code_and_weights(serve):
    served = ready(serve)
    run(served)
    prepared = served.prepared
    code = prepared._core.steps.code
    buffers = [weakref.ref(buffer) for buffer in code.inputs._buffers.values()]
    others = [weakref.ref(thing) for thing in (code.call, served.model, served.stage)]
    rows = prepared.report()["dispatch"]
    prepared.close()
    del served, code
    gc.collect()
    assert [ref() for ref in buffers + others] == [None] * 4
    assert prepared.report()["dispatch"] == rows
    assert prepared.recordings() == []


def test_what_is_kept_per_size_is_bounded(serve, monkeypatch):
    monkeypatch.setattr(installed_graph, "_MOST_KEPT", 2)
    served = ready(serve, sizes=(8,))
    for num_tokens in (1, 2, 3, 4, 3, 5):
        assert torch.equal(*run(served, (num_tokens, 1)))
    graphs = [graph.replay.__self__ for graph in served.prepared._core.graphs.present()]
    assert {tuple(graph._by_size) for graph in graphs if graph._by_size} == {((2,),), ((5,), (6,))}
