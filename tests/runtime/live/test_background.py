"""A model is served uncompiled while a thread compiles it, and switches between two steps.

Results are compared bit for bit before, at and after the switch, on a strict backend.
"""

import json
import math
import os
import random
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from piecegraph import Batch, Events, Ranks
from piecegraph.compile import ahead, pipeline
from piecegraph.compile.ir import registered_compilers as registry
from piecegraph.errors import GuardUnproved, ModelClosed
from piecegraph.runtime.capture.graph_set import GraphSet
from piecegraph.runtime.core.records import BackgroundFailure, Switched
from piecegraph.runtime.parts.starts import part as starts
from tests.processes import two_ranks
from tests.unkept import UNKEPT, settings_that_keep_nothing

from ..conftest import Computes
from .conftest import HIDDEN, LENGTHS, Gained, Model, Texts

pytestmark = pytest.mark.compile


def facts(served):
    return served.prepared.report()["background"]


def serve_until_over(served):
    """Random steps until compiled code serves, or the model stays uncompiled."""
    while facts(served)["state"] == "compiling":
        served.step(*random.choice(LENGTHS))
        time.sleep(0.003)  # requests that arrive one by one leave time for the thread


@pytest.mark.parametrize("strategy", ["eager", "delayed"])
def test_steps_are_right_before_and_after_the_switch(serve_cold, strategy):
    served = serve_cold(strategy=strategy, steps={"after_seal": "raise"}).capture()
    served.prepared.seal()
    kept = torch.zeros(1)
    served.prepared.watch("kept", kept)
    served.prepared.keep_steps(1)
    assert served.step(3, 1) == "NONE 4"
    assert [step.mode for step in served.prepared.last_steps()] == ["NONE"]
    assert not served.prepared.report()["cache"]["hit"]
    serve_until_over(served)
    modes = {served.step(*lengths) for lengths in LENGTHS * 3}
    assert {"PIECEWISE 2", "PIECEWISE 4", "PIECEWISE 8", "NONE 16"} <= modes
    found = facts(served)
    assert (found["state"], found["failures"]) == ("compiled", [])
    assert found["switch"]["steps"] > 0
    assert "trace.dynamo" in [phase["phase"] for phase in found["phases"]]
    report = served.prepared.report()
    assert report["counters"]["dynamo_traces"] > 0
    assert not report["cache"]["hit"]
    assert sum(row["count"] for row in report["dispatch"]) > found["switch"]["steps"]
    assert "kept" in served.prepared.parts.checks.addresses._parts
    assert serve_cold().prepared.compiled.from_bundle  # the next start is warm


@pytest.mark.parametrize("strategy", ["eager", "lazy"])
def test_the_switch_comes_between_steps_in_flight(serve_cold, strategy):
    replay = {"delay": True, "fail_on_early_writes": True}
    served = serve_cold(strategy=strategy, replay=replay).capture()
    steps = []
    for switches in (False, False, True, False, False):
        if switches:
            served.prepared.wait_until_compiled()
        x = torch.randn(4, HIDDEN)
        with torch.no_grad():
            result = served.prepared(x, batch=Batch(4, 1)).clone()
        steps.append((x, result))
    assert not served.prepared.reads_done().query()
    assert facts(served)["state"] == "compiled"
    for x, result in steps:
        assert torch.equal(result, served.expected(x))


@pytest.mark.parametrize("strategy", ["eager", "lazy"])
def test_graphs_are_captured_between_the_steps_from_the_switch_on(serve_cold, strategy):
    served = serve_cold(strategy=strategy).capture()
    serve_until_over(served)
    captured = [0]
    wanted = 3 if strategy == "eager" else 1
    while captured[-1] < wanted:
        captured.append(len(served.prepared.recordings()))
        served.step(16)  # has no graph
    assert captured == list(range(wanted + 1))  # the first before the step that switched
    assert served.step(8) == "PIECEWISE 8"


def test_probes_of_a_memory_limit_run_between_steps_too(serve_cold, monkeypatch):
    recorded, record = list[int](), GraphSet.record

    def counted(graphs, graph_index, session):
        recorded.append(graph_index)
        return record(graphs, graph_index, session)

    monkeypatch.setattr(GraphSet, "record", counted)
    served = serve_cold(steps={"memory_limit": 10**9}).capture()
    serve_until_over(served)
    per_step = [len(recorded)]
    while len(served.prepared.recordings()) < 3:
        before = len(recorded)
        served.step(16)  # has no graph
        per_step.append(len(recorded) - before)
    assert max(per_step) == 1
    assert sum(per_step) == 4 + 3  # three sizes, the smallest alone, then the captures
    assert served.prepared.events.named("memory.forecast")
    assert served.step(8) == "PIECEWISE 8"


def test_who_closes_while_a_forecast_is_made_leaves_no_graph(serve_cold):
    served = serve_cold(steps={"memory_limit": 10**9}).capture()
    serve_until_over(served)
    served.step(16)
    assert served.prepared.backend.memory().used > 0
    served.prepared.close()
    assert served.prepared.backend.memory().used == 0


def test_the_startup_set_after_the_switch_is_not_evicted(serve_cold):
    served = serve_cold(strategy={"kind": "lazy", "max_bytes": 1}).capture()
    serve_until_over(served)
    for _ in range(3):
        served.step(2)
    assert served.step(8) == "PIECEWISE 8"
    assert not served.prepared.events.named("capture.evicted")


@pytest.mark.parametrize("captured", [False, True])
def test_another_thread_may_wait_for_the_switch(serve_cold, monkeypatch, captured):
    """No step runs while the model switches, however long that takes."""
    make = GraphSet.__init__

    def make_slowly(*arguments):
        time.sleep(0.2)
        make(*arguments)

    served, ended = serve_cold(), list[bool]()
    if captured:
        served.prepared.capture()
    monkeypatch.setattr(GraphSet, "__init__", make_slowly)
    wait = lambda: ended.append(served.prepared.wait_until_compiled())  # noqa: E731
    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        served.step(*random.choice(LENGTHS))
    assert ended == [True]
    assert len(served.prepared.records.of(Switched)) == 1
    for lengths in LENGTHS:
        served.step(*lengths)


def test_the_switch_can_be_awaited_and_a_step_without_tokens_runs_before_it(serve_cold):
    served = serve_cold(graph_mode="NONE", capture_sizes=None)
    assert not served.prepared.wait_until_compiled(timeout_s=0)
    empty = served.prepared(torch.empty(0, HIDDEN), batch=Batch(0, 0))
    assert empty.shape == (0, HIDDEN)
    assert served.prepared.wait_until_compiled()
    assert served.prepared.compiled.bundle is not None
    served.step(3, 1)


def test_a_model_that_cannot_be_compiled_is_served_uncompiled(serve_cold, caplog):
    alone = {"splitting_ops": (), "graph_mode": "NONE", "capture_sizes": None}
    branches = Computes(lambda x: x + 1 if x.shape[0] % 2 else x - 1)
    served = serve_cold(branches, **alone)
    assert not served.prepared.wait_until_compiled()
    (failure,) = facts(served)["failures"]
    assert "GuardUnproved" in failure["reason"]
    assert "GuardUnproved" in caplog.text
    served.step(3)
    served.step(12)
    with pytest.raises(GuardUnproved):
        serve_cold(branches, bundle="use", **alone)


def test_a_model_that_is_prepared_in_inference_mode_switches(serve_cold):
    with torch.inference_mode():
        served = serve_cold()
        assert served.prepared.wait_until_compiled()
        served.step(3, 1)


def test_a_model_that_is_changed_meanwhile_is_compiled_again(serve_cold, before_code):
    model = Gained()
    before_code(lambda: setattr(model, "gain", 3.0))
    served = serve_cold(model)
    assert served.prepared.wait_until_compiled(300)
    assert facts(served)["failures"] == []
    served.step(3, 1)


@pytest.fixture
def held(before_code, monkeypatch):
    """The thread waits for this before it compiles a piece; the pieces are in `held.pieces`."""
    event = threading.Event()
    event.pieces = list[str]()

    def wait():
        event.pieces.append("piece")
        assert event.wait(300)

    before_code(wait)
    monkeypatch.setattr(starts, "CLOSE_S", 0.05)
    yield event
    event.set()


def test_who_waits_in_a_thread_is_told_that_the_model_was_closed(serve_cold, held):
    waiting, ended = threading.Event(), list[Exception]()
    served = serve_cold()
    thread = served.prepared.parts.starts.beside.thread
    join = thread.join

    def join_and_say_so(timeout_s=None):
        waiting.set()
        return join(timeout_s)

    thread.join = join_and_say_so

    def wait_until_compiled():
        try:
            served.prepared.wait_until_compiled()
        except ModelClosed as error:
            ended.append(error)

    waiter = threading.Thread(target=wait_until_compiled)
    waiter.start()
    assert waiting.wait(300)
    served.prepared.close()
    waiter.join()
    assert len(ended) == 1
    assert served.prepared.records.of(BackgroundFailure) == []


def test_closing_waits_a_while_for_the_thread_which_ends_before_the_next_piece(serve_cold, held):
    served = serve_cold()
    thread = served.prepared.parts.starts.beside.thread
    while not held.pieces:
        time.sleep(0.01)
    served.prepared.close()
    assert not thread.join(0)
    held.set()
    assert thread.join(300)
    assert held.pieces == ["piece"]
    again = serve_cold()
    assert again.prepared.wait_until_compiled(300)
    again.step(3, 1)


def test_events_of_the_thread_are_told_to_the_caller(serve_cold, hostile_engine):
    events = Events()
    served = serve_cold(events=events)
    assert served.prepared.wait_until_compiled(300)
    pieces = [event.facts["piece"] for event in events.named("compile.end")]
    if hostile_engine is not None:  # a try that it disturbed compiled some, too
        pieces = [*dict.fromkeys(pieces)]
    assert pieces == [0, 1, 2]
    assert events.counters["dynamo_traces"] == served.prepared.records.counters["dynamo_traces"]
    assert "compile" not in [name for name, _ in served.prepared.records.phases]


def test_what_cannot_be_stored_is_compiled_at_once(serve_cold, caplog):
    served = serve_cold(compiler="eager")
    assert served.prepared.compiled.traced
    assert "compiler 'eager' keeps no artifacts" in caplog.text
    served.step(3, 1)


@pytest.mark.parametrize("kind", UNKEPT)
def test_what_no_cache_keeps_serves_from_the_thread(
    serve_cold, tmp_path, monkeypatch, kind, hostile_engine
):
    served = serve_cold(**settings_that_keep_nothing(kind, tmp_path, monkeypatch)).capture()
    assert not served.prepared.compiled.traced
    assert served.prepared.wait_until_compiled(300), facts(served)
    assert len(served.prepared.recordings()) == 3
    assert served.step(8) == "PIECEWISE 8"
    assert facts(served)["failures"] == []
    traces = served.prepared.report()["counters"]["dynamo_traces"]
    assert traces == 1 or hostile_engine is not None
    assert served.prepared.compiled.bundle is None


class ReadsTheEnvironment(Model):
    def forward(self, x):
        return super().forward(x) * len(os.environ)


def test_what_has_no_condition_is_traced_again_before_it_serves(
    serve_cold, before_code, monkeypatch
):
    before_code(lambda: monkeypatch.setenv("PG_READ_BY_A_FORWARD", "1"))
    served = serve_cold(ReadsTheEnvironment())
    assert served.prepared.wait_until_compiled(300), facts(served)
    served.step(3, 1)


def fail():
    raise RuntimeError("no compiler here")


def serve_on_a_rank(rank, folder, serve, lost):
    """A forked rank: random steps until compiled code serves or all stay uncompiled.

    `lost` lets rank 1 fail to compile. Libraries are built on each rank.
    """
    torch.set_num_threads(1)
    random.seed(0)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    if lost and rank == 1:
        registry.entry_points = lambda group: [Texts(before=fail)]
    ahead.compile_ahead = lambda request: bool(request.checkpoint())
    served = serve(
        ranks=Ranks(),
        cache_dir=folder / (f"cache {rank}" if lost else "cache"),
        bundle="serve_ahead",
    ).capture()
    serve_until_over(served)
    while not (lost or libraries(served)):
        time.sleep(0.01)
    for lengths in LENGTHS:
        served.step(*lengths)
    (folder / f"{rank}.json").write_text(json.dumps(served.prepared.report()))
    served.prepared.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks
@pytest.mark.parametrize("lost", [False, True])
def test_ranks_switch_at_the_same_step_or_not_at_all(serve_cold, tmp_path, lost):
    two_ranks(serve_on_a_rank, tmp_path, serve_cold, lost)
    one, other = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    if lost:
        assert {report["background"]["state"] for report in (one, other)} == {"failed"}
        assert "rank 1: PieceFailed" in one["background"]["failures"][0]["reason"]
        return
    assert one["background"]["switch"]["steps"] == other["background"]["switch"]["steps"] > 0
    sizes = [[row["num_tokens"] for row in report["captures"]] for report in (one, other)]
    assert sizes[0] == sizes[1]
    for report in (one, other):
        assert [built["reason"] for built in report["background"]["libraries"]] == [None]
    phases = [phase["phase"] for report in (one, other) for phase in report["background"]["phases"]]
    assert phases.count("trace.dynamo") == 1  # one rank compiled for both


def libraries(served):
    return facts(served)["libraries"]


def refuses(request):
    request.records.failed_libraries.append("no such op")
    return False


def raises(request):
    return request.no_such_thing


@pytest.mark.parametrize(("build", "reason"), [(refuses, "no such op"), (raises, "AttributeError")])
def test_libraries_are_built_once_compiled_code_serves(serve_cold, monkeypatch, build, reason):
    monkeypatch.setattr(ahead, "compile_ahead", build)
    served = serve_cold(bundle="serve_ahead", steps={"after_seal": "raise_all"}).capture()
    served.prepared.seal()
    serve_until_over(served)
    while served.prepared.parts.starts.beside is not None:  # the thread ends after its event
        served.step(3, 1)
    (built,) = libraries(served)
    assert reason in built["reason"]
    assert len(served.prepared.events.named("background.libraries")) == 1
    assert served.step(3, 1) == "PIECEWISE 4"
    assert served.prepared.parts.starts.beside is None


def test_an_export_of_the_engine_while_a_key_is_made_is_no_failure(serve_cold, monkeypatch):
    """In two tries it begins before the key of the bundle is made, and ends soon after."""
    exports, ends, make_key = [0.2, 0.2], [0.0], pipeline.trace_key
    compile_pieces = pipeline._compile

    def key_of_a_trace(*given):
        if not exports or sys._getframe(1).f_code.co_name != "_traced_and_compiled":
            return make_key(*given)
        ends[0] = math.inf
        try:
            return make_key(*given)
        finally:
            ends[0] = time.monotonic() + exports.pop()

    def compile_after_it(*given):
        time.sleep(max(0, ends[0] - time.monotonic()))
        return compile_pieces(*given)

    monkeypatch.setattr(pipeline, "trace_key", key_of_a_trace)
    monkeypatch.setattr(pipeline, "_compile", compile_after_it)

    def is_exporting():
        """Not for a hostile engine's thread, whose calls of `torch.compile` would warn."""
        hostile = threading.current_thread().name == "hostile-engine"
        return not hostile and time.monotonic() < ends[0]

    monkeypatch.setattr(torch.compiler, "is_exporting", is_exporting)
    served = serve_cold()
    assert served.prepared.wait_until_compiled(), facts(served)
    assert not exports


@pytest.mark.parametrize("caller", ["without_bundle", "_traced_and_compiled"])
def test_a_key_that_is_made_under_the_flags_of_an_export_is_no_failure(
    serve_cold, monkeypatch, caller
):
    """In two tries; they are as before when the key is made."""
    exports, make_key = [1, 2], pipeline.trace_key

    def key(*given):
        beside = threading.current_thread() is not threading.main_thread()
        if not (beside and exports and sys._getframe(1).f_code.co_name == caller):
            return make_key(*given)
        exports.pop()
        with torch.backends.mkldnn.flags(enabled=False):
            return make_key(*given)

    monkeypatch.setattr(pipeline, "trace_key", key)
    served = serve_cold()
    assert served.prepared.wait_until_compiled(), facts(served)
    assert not exports
    served.step(3, 1)


def test_closing_ends_the_building_of_libraries(serve_cold, monkeypatch):
    begun = threading.Event()

    def build(request):
        begun.set()
        while True:
            request.checkpoint()
            time.sleep(0.01)

    monkeypatch.setattr(ahead, "compile_ahead", build)
    served = serve_cold(bundle="serve_ahead")
    served.prepared.wait_until_compiled()
    assert begun.wait(300)
    served.step(3, 1)
    served.prepared.close()
    assert all(thread.name != "piecegraph-libraries" for thread in threading.enumerate())
    assert libraries(served) == []
