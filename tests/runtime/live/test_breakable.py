"""Breakable capture: graphs of a forward that is not traced, with the same dispatcher."""

from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from piecegraph import (
    Batch,
    Config,
    Events,
    ForwardContext,
    GraphMode,
    break_graph,
    forward_context,
    get_forward_context,
    prepare,
)
from piecegraph.errors import AllCapturesFailed, ResultFormUnknown
from piecegraph.runtime.capture.breaks import recordable
from piecegraph.runtime.capture.recording import SegmentKind
from piecegraph.tools.explain import explain
from piecegraph.torch_compat.basics.ops import OpOverload

from ..conftest import Computes, captured, small_config, strict_backend

GRAPH, EAGER = SegmentKind.GRAPH, SegmentKind.EAGER


@break_graph
def attend(x, out):
    """Reads a value on the host, which cannot be traced or captured."""
    out.copy_(x * get_forward_context().metadata["scale"].item())


@break_graph(fake=torch.empty_like)
def attend_fresh(x):
    return x * get_forward_context().metadata["scale"].item()


@break_graph
def attend_fresh_without_fake(x):
    return attend_fresh(x)


class Untraceable(nn.Module):
    """x -> ((x + w) * scale + x) twice, then rows and a sum over columns, in a dict."""

    def __init__(self, attention=attend):
        super().__init__()
        self.shift = nn.Parameter(torch.rand(4), requires_grad=False)
        self.attention = attention
        self.calls = []

    def forward(self, x, *, factor=2.0):
        self.calls.append(f"{id(self):x}")  # a side effect
        for _ in range(2):
            y = x + self.shift
            if self.attention is attend:
                out = torch.empty_like(y)
                self.attention(y, out)
            else:
                out = self.attention(y)
            x = out + x
        return {"rows": x * factor, "sums": (x.sum(1), 7)}


def prepared_for(model, mode, **settings):
    attention, metadata = {"support": "UNIFORM_SINGLE_TOKEN_DECODE"}, {"scale": torch.tensor(1.0)}
    settings = {"attention": attention, "capture_sizes": (2, 4, 8), "compile": False, **settings}
    return captured(model, 16, metadata_for=lambda *_: metadata, graph_mode=mode, **settings)


def check(prepared, model, batch, scale):
    metadata = {"scale": torch.tensor(scale)}
    x = torch.randn(batch.num_tokens, 4)
    decision = prepared.dispatch(batch)
    got = prepared.run(decision, x, metadata=metadata)
    with forward_context(ForwardContext({}, metadata)), torch.no_grad():
        expected = model(x)
    assert got.keys() == expected.keys()
    assert torch.equal(got["rows"], expected["rows"])
    assert torch.equal(got["sums"][0], expected["sums"][0])
    assert got["sums"][1] == 7
    return f"{decision.mode.name} {decision.descriptor.num_tokens}"


@pytest.mark.parametrize("attention", [attend, attend_fresh])
def test_piecewise_graphs_break_at_splitting_functions(attention):
    model = Untraceable(attention)
    prepared = prepared_for(model, GraphMode.PIECEWISE)
    kinds = [segment.kind for segment in prepared.recordings()[0][1].segments]
    assert kinds == [GRAPH, EAGER, GRAPH, EAGER, GRAPH]
    model.calls.clear()
    for scale in (1.0, 3.0):
        assert check(prepared, model, Batch(3, 1), scale) == "PIECEWISE 4"
        assert check(prepared, model, Batch(8, 8, True, 1), scale) == "PIECEWISE 8"
        assert check(prepared, model, Batch(12, 2), scale) == "NONE 12"
    assert len(model.calls) == 2 * (3 + 1)  # of the model alone, and of the steps without a graph


def test_memory_refresh_the_step_log_and_the_traffic_without_a_trace():
    model = Untraceable()
    unlimited = prepared_for(model, GraphMode.PIECEWISE)
    limit = unlimited.backend.memory().used - 1
    limited = prepared_for(model, GraphMode.PIECEWISE, steps={"memory_limit": limit})
    assert 0 < len(limited.recordings()) < len(unlimited.recordings()) == 3
    model.shift = nn.Parameter(torch.rand(4), requires_grad=False)
    assert sorted(unlimited.refresh()) == [index for index, _ in unlimited.recordings()]
    unlimited.parts.log.keep(2)
    for _ in range(3):
        assert check(unlimited, model, Batch(3, 1), 2.0) == "PIECEWISE 4"
    assert [step.mode for step in unlimited.parts.log.last_steps()] == ["PIECEWISE"] * 2
    assert unlimited.usage.counts(4) == [0, 0, 0, 3, 0]
    assert unlimited.parts.strategies.ledger.bytes("weights") == 16


class Block(nn.Module):
    def forward(self, x):
        y = x + 1
        out = torch.empty_like(y)
        attend(y, out)
        return x + out


def test_a_profile_names_breaks_and_graphs_by_their_modules():
    model = nn.Sequential(Block(), Block())
    config = {"inputs": {"input": "float32[num_tokens, 4]"}, "capture_sizes": (4,)}
    prepared = prepared_for(model, GraphMode.PIECEWISE, **config)
    prepared.parts.log.profiler_ranges()
    with torch.profiler.profile() as profile:
        prepared(torch.rand(4, 4), batch=Batch(4, 1), metadata={"scale": torch.tensor(1.0)})
    names = {event.key for event in profile.key_averages()}
    assert {"op attend 0", "op attend 1", "graph PIECEWISE 4"} < names
    assert {"graph PIECEWISE 4 after attend 0", "graph PIECEWISE 4 after attend 1"} < names


def test_explain_shows_what_a_model_without_a_trace_has():
    text = explain(prepared_for(Untraceable(), GraphMode.PIECEWISE), "md")
    assert "Compiled regions" in text
    assert "Policy: prove" not in text


class Capturable(nn.Module):
    """Attention that a graph may contain: it reads only tensors that keep their address."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.rand(4), requires_grad=False)

    def forward(self, x):
        y = x + self.shift
        out = torch.empty_like(y)
        torch.ops.breakable_tests.attend(y, out)
        return out.flatten() + 1


def test_splitting_ops_break_without_a_decorator_and_full_contains_them(temporary_op):
    def kernel(x, out):
        out.copy_(x * 3)

    op = temporary_op("breakable_tests::attend", "(Tensor x, Tensor(a!) out) -> ()", kernel)
    model = Capturable()
    prepared = prepared_for(model, GraphMode.FULL_AND_PIECEWISE, splitting_ops=(op,))
    kinds = {
        recording.name: [segment.kind for segment in recording.segments]
        for _, recording in prepared.recordings()
    }
    assert kinds["PIECEWISE 4"] == [GRAPH, EAGER, GRAPH]
    assert kinds["FULL 4"] == [GRAPH]
    for batch, mode_name in ((Batch(3, 3, True, 1), "FULL"), (Batch(3, 1), "PIECEWISE")):
        x = torch.randn(3, 4)
        decision = prepared.dispatch(batch)
        assert decision.mode.name == mode_name
        assert torch.equal(prepared.run(decision, x), ((x + model.shift) * 3).flatten() + 1)
    assert prepared.report()["captures"]


def test_two_threads_that_run_it_with_breaks_leave_calls_of_operators_as_they_were(temporary_op):
    """Each replaces what calls an operator; the second would put back what the first had put."""
    first_runs, second_runs, first_ended = Event(), Event(), Event()

    def kernel(x):
        if not first_runs.is_set():
            first_runs.set()
            second_runs.wait(0.3)
        else:
            second_runs.set()
            first_ended.wait(10)

    op = temporary_op("breakable_tests::wait", "(Tensor x) -> ()", kernel)
    waits = Computes(lambda x: (torch.ops.breakable_tests.wait(x), x + 1)[1])
    compiled = prepared_for(waits, GraphMode.NONE, splitting_ops=(op,)).compiled
    before = OpOverload.__call__
    first, second = (
        Thread(target=recordable(compiled, (op,)), args=(torch.ones(4, 4),)) for _ in range(2)
    )
    first.start()
    assert first_runs.wait(10)
    second.start()
    first.join()
    first_ended.set()
    second.join()
    assert second_runs.is_set()
    assert OpOverload.__call__ is before


def test_a_piecewise_graph_that_never_breaks_is_refused():
    with pytest.raises(AllCapturesFailed, match="no splitting function was called"):
        prepared_for(Computes(lambda x: x + 1), GraphMode.PIECEWISE)


def test_without_a_graph_mode_there_are_no_graphs():
    model = Untraceable()
    prepared = prepared_for(model, None)
    assert prepared.recordings() == []
    assert check(prepared, model, Batch(3, 1), 2.0) == "NONE 3"


def test_the_form_of_a_result_needs_fakes_of_functions_that_return_tensors():
    with pytest.raises(ResultFormUnknown, match="TypeError.*fake="):
        prepared_for(Untraceable(attend_fresh_without_fake), GraphMode.PIECEWISE)


@break_graph
def attend_rows(x, out):
    out.copy_(x.cumsum(0) * get_forward_context().metadata["scale"].item())


class Mixing(nn.Module):
    """Rows mix before the break, or after it."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.weight = nn.Parameter(torch.rand(4, 4), requires_grad=False)

    def forward(self, x):
        y = x @ self.weight
        if self.where == "before":
            y = y - x.mean(0)
        out = torch.empty_like(y)
        attend_rows(y, out)
        return out - out.amax(0) if self.where == "after" else out + x


@pytest.mark.parametrize("where", ["before", "after", "nowhere"])
@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_padding_never_reaches_real_rows_of_a_model_that_is_not_traced(where, mode):
    model = Mixing(where)
    full = mode is GraphMode.FULL
    if full:  # without attention that reads a value on the host
        model.forward = lambda x: x @ model.weight - (x.mean(0) if where != "nowhere" else 0)
    prepared = prepared_for(model, mode, attention={"support": "ALWAYS"})
    mixes = prepared.report()["rows_mixed"]
    assert bool(mixes) == (where != "nowhere")
    assert all(each["where"].startswith(f"{__file__}:") for each in mixes)
    x, metadata = torch.rand(3, 4) + 1, {"scale": torch.tensor(2.0)}
    decision = prepared.dispatch(Batch(3, 3))
    with forward_context(ForwardContext({}, metadata)), torch.no_grad():
        torch.testing.assert_close(prepared.run(decision, x, metadata=metadata), model(x))
    assert (decision.mode.name == "NONE") == bool(mixes)


class Stateful(nn.Module):
    """Writes buffers in place, assigns new ones, and keeps what it makes when it is first run."""

    def __init__(self):
        super().__init__()
        self.register_buffer("written", torch.zeros(4))
        self.register_buffer("assigned", torch.zeros(()))
        self.plain = torch.zeros(4)
        self.table = None
        self.tables = []

    def forward(self, x):
        self.written.add_(1)
        self.plain[0] += 1
        self.assigned = self.assigned + 1
        if self.table is None:
            self.table = torch.arange(4.0)
            self.tables.append(self.table)
        return x * self.written + self.table


@pytest.mark.parametrize("mode", [GraphMode.FULL, None])
def test_prepare_changes_nothing_of_the_model(mode):
    model = Stateful()
    attributes = {**vars(model), **model._buffers}
    config = small_config(16, compile=False, capture_sizes=(4,), graph_mode=mode)
    prepare(model, config, backend=strict_backend())
    assert model.written.sum() == model.plain.sum() == model.assigned == 0
    now = {**vars(model), **model._buffers}
    assert now.keys() == attributes.keys()
    assert all(now[name] is value for name, value in attributes.items())
    assert model.tables == []


def test_what_is_reported_is_of_the_last_of_two_models_that_share_their_events():
    events = Events()
    config = Config(compile=False, inputs={"x": "float32[num_tokens, 4]"}, cache=False)
    for _ in range(2):
        prepared = prepare(Untraceable(), config, events=events)
    last = [span for span in events.spans if span.name == "prepare"][-1]
    assert prepared.report()["startup"]["prepare_seconds"] == last.seconds


def test_what_the_level_decides_is_reported():
    config = Config(compile=False, inputs={"x": "float32[num_tokens, 4]"}, cache=False, level=0)
    prepared = prepare(Untraceable(), config)
    (event,) = prepared.events.named("config")
    assert event.facts["settings"]["compiler"] == prepared.config.compiler == "eager"


class Leaving(nn.Module):
    """A break leaves a tensor on an object, which code behind it reads."""

    def __init__(self, leave):
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)
        self.kept = SimpleNamespace(sizes={})
        self.leave = leave

    @break_graph(fake=lambda self, q: torch.empty_like(q))
    def attention(self, q):
        return self.leave(self.kept, q)

    def forward(self, x):
        y = self.attention(self.linear(x))
        return y + self.kept.norm if hasattr(self.kept, "norm") else y


def leave_new(kept, q):
    kept.norm = q.abs().sum(-1, keepdim=True)
    return q + 1


def leave_result(kept, q):
    kept.norm = q + 1
    return kept.norm


def write_kept(kept, q):
    if len(q) not in kept.sizes:
        kept.sizes[len(q)] = torch.empty(len(q), 1)  # a workspace for each size
    kept.norm = kept.sizes[len(q)]
    kept.norm.copy_(q.abs().sum(-1, keepdim=True))
    return q + 1


@pytest.mark.parametrize("leave", [leave_new, leave_result])
def test_vllm_45341_a_tensor_that_leaves_a_break_is_refused_with_both_lines(leave):
    with pytest.raises(AllCapturesFailed, match="left elsewhere") as caught:
        prepared_for(Leaving(leave), GraphMode.PIECEWISE)
    first = Leaving.forward.__code__.co_firstlineno + 1
    for line in (first, first + 1):
        assert f"test_breakable.py:{line}" in str(caught.value)


def test_a_break_may_write_to_what_the_model_keeps():
    prepared = prepared_for(Leaving(write_kept), GraphMode.PIECEWISE)
    assert len(prepared.recordings()) == 3
    for num_tokens in (1, 2, 4):
        x = torch.randn(num_tokens, 4)
        got = prepared(x, batch=Batch(num_tokens, 1)).clone()
        torch.testing.assert_close(got, prepared.compiled.model(x))
