"""A model is served uncompiled while a child process compiles it, and switches between two steps.

Results are compared bit for bit before, at and after the switch, on a strict backend.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # so that each fork has it
import torch.distributed as dist
from torch import Tensor, nn

from piecegraph import (
    Batch,
    Config,
    Decision,
    ForwardContext,
    PreparedModel,
    Ranks,
    StepObserver,
    forward_context,
    prepare,
)
from piecegraph.compile.backends import registry
from piecegraph.compile.backends.registry import Compiler
from piecegraph.errors import GuardUnproved, InvalidSetting, ModelClosed
from piecegraph.runtime import background
from piecegraph.runtime.graphs.graph_set import GraphSet
from piecegraph.runtime.records import BackgroundFailure, Eviction, Switched

from ..conftest import strict_backend
from .conftest import HIDDEN, MAX_TOKENS, LiveServed, Model, Stage


class Texts:
    """An entry point of a compiler whose artifact of a piece is the piece's Python source."""

    name = "texts"

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        """`before` is called before each piece is compiled."""
        self.before = before

    def load(self) -> Compiler:
        return Compiler(self.name, self.compile, self.load_artifacts)

    def compile(self, graph: Any, inputs: Any, options: Any) -> Any:
        self.before()
        blobs = {"code": graph.code.encode()}
        return lambda: (self.load_artifacts([blobs])[0], blobs)

    def load_artifacts(self, artifacts: Any) -> Any:
        return [self._loaded(blobs["code"].decode()) for blobs in artifacts]

    def _loaded(self, code: str) -> Callable[[list[Any]], Any]:
        names: dict[str, Any] = {"torch": torch, "device": torch.device}
        exec(code, names)
        return lambda args: names["forward"](None, *args)


LENGTHS = ((1,), (1, 1, 1), (5,), (3, 1), (16,), (1,) * 8, (2, 7))


@pytest.fixture
def serve_cold(
    attend_op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LiveServed]]:
    """A model prepared with `bundle="serve"` on an empty cache."""
    monkeypatch.setattr(registry, "entry_points", lambda group: [Texts()])
    served: list[PreparedModel] = []

    def serve(
        model: nn.Module | None = None, ranks: Ranks | None = None, **settings: Any
    ) -> LiveServed:
        config = Config(
            splitting_ops=(attend_op,),
            inputs={"x": f"float32[num_tokens, {HIDDEN}]"},
            steps={"padding": {"x": float("nan")}},
            max_num_tokens=MAX_TOKENS,
            max_num_reqs=MAX_TOKENS,
            graph_mode="PIECEWISE",
            capture_sizes=(2, 4, 8),
            compiler="texts",
            cache_dir=tmp_path / "cache",
            bundle="serve",
        ).changed(**settings)
        model, stage = model or Model(), Stage()
        prepared = prepare(
            model, config, layers={"stage": stage}, backend=strict_backend(), ranks=ranks
        )
        served.append(prepared)

        def expected(x: Tensor) -> Tensor:
            with forward_context(ForwardContext({"stage": stage})), torch.no_grad():
                result: Tensor = model(x)
            return result

        return LiveServed(prepared, expected, model, stage)

    yield serve
    for prepared in served:
        prepared.close()


def facts(served: LiveServed) -> dict[str, Any]:
    found: dict[str, Any] = served.prepared.report()["background"]
    return found


def serve_until_over(served: LiveServed) -> None:
    """Random steps until compiled code serves, or the model stays uncompiled."""
    while facts(served)["state"] == "compiling":
        served.step(*random.choice(LENGTHS))
        time.sleep(0.003)  # requests that arrive one by one leave time for the child


def child_of(served: LiveServed) -> int | None:
    gate = served.prepared._gate
    return gate.background._child if gate is not None else None


@pytest.mark.compile
@pytest.mark.parametrize("strategy", ["eager", "delayed"])
def test_steps_are_right_before_and_after_the_switch(
    serve_cold: Callable[..., LiveServed], strategy: str
) -> None:
    served = serve_cold(strategy=strategy, steps={"after_seal": "raise"})
    served.prepared.capture()
    served.prepared.seal()
    kept = torch.zeros(1)
    served.prepared.watch("kept", kept)
    assert served.step(3, 1) == "NONE 4"
    assert served.prepared.report()["counters"]["dynamo_traces"] == 0
    serve_until_over(served)
    modes = {served.step(*lengths) for lengths in LENGTHS * 3}
    assert {"PIECEWISE 2", "PIECEWISE 4", "PIECEWISE 8", "NONE 16"} <= modes
    found = facts(served)
    assert (found["state"], found["failures"]) == ("compiled", [])
    assert found["switch"]["steps"] > 0
    assert "trace.dynamo" in [phase["phase"] for phase in found["phases"]]
    report = served.prepared.report()
    assert report["counters"]["dynamo_traces"] == 0
    assert not report["cache"]["hit"]
    assert sum(row["count"] for row in report["dispatch"]) > found["switch"]["steps"]
    assert "kept" in served.prepared._steps.code.addresses._parts
    assert serve_cold().prepared.compiled.from_bundle  # the next start is warm


@pytest.mark.compile
@pytest.mark.parametrize("strategy", ["eager", "lazy"])
def test_graphs_are_captured_between_the_steps_after_the_switch(
    serve_cold: Callable[..., LiveServed], strategy: str
) -> None:
    served = serve_cold(strategy=strategy)
    served.prepared.capture()
    serve_until_over(served)
    captured = [0]
    wanted = 3 if strategy == "eager" else 1
    while captured[-1] < wanted:
        captured.append(len(served.prepared.recordings()))
        served.step(16)  # has no graph
    assert captured == [0, *range(wanted + 1)]
    assert served.step(8) == "PIECEWISE 8"


@pytest.mark.compile
def test_probes_of_a_memory_limit_run_between_steps_too(
    serve_cold: Callable[..., LiveServed], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, record = list[int](), GraphSet.record

    def counted(graphs: GraphSet, graph_index: int, session: Any) -> Any:
        recorded.append(graph_index)
        return record(graphs, graph_index, session)

    monkeypatch.setattr(GraphSet, "record", counted)
    served = serve_cold(steps={"memory_limit": 10**9})
    served.prepared.capture()
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


@pytest.mark.compile
def test_who_closes_while_a_forecast_is_made_leaves_no_graph(
    serve_cold: Callable[..., LiveServed],
) -> None:
    served = serve_cold(steps={"memory_limit": 10**9})
    served.prepared.capture()
    serve_until_over(served)
    served.step(16)
    assert served.prepared.backend.memory().used > 0
    served.prepared.close()
    assert served.prepared.backend.memory().used == 0


@pytest.mark.compile
def test_the_startup_set_after_the_switch_is_not_evicted(
    serve_cold: Callable[..., LiveServed],
) -> None:
    served = serve_cold(strategy={"kind": "lazy", "max_bytes": 1})
    served.prepared.capture()
    serve_until_over(served)
    for _ in range(3):
        served.step(2)
    assert served.step(8) == "PIECEWISE 8"
    assert not served.prepared.records.of(Eviction)


@pytest.mark.compile
def test_the_steps_of_an_uncompiled_model_are_logged(
    serve_cold: Callable[..., LiveServed],
) -> None:
    served = serve_cold()
    seen = list[tuple[Batch, Decision]]()

    class Observer(StepObserver):
        def dispatched(self, batch: Batch, decision: Decision) -> None:
            seen.append((batch, decision))

    served.prepared.observe(Observer())
    served.step(3, 1)
    assert [decision.mode.name for _, decision in seen] == ["NONE"]


@pytest.mark.compile
@pytest.mark.parametrize("captured", [False, True])
def test_another_thread_may_wait_for_the_switch(
    serve_cold: Callable[..., LiveServed], monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """No step runs while the model switches, however long that takes."""
    make = GraphSet.__init__

    def make_slowly(*arguments: Any) -> None:
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


@pytest.mark.compile
def test_who_waits_for_the_switch_has_the_graphs_of_startup(
    serve_cold: Callable[..., LiveServed],
) -> None:
    served = serve_cold()
    served.prepared.capture()
    assert served.prepared.wait_until_compiled()
    assert len(served.prepared.recordings()) == 3


@pytest.mark.compile
def test_the_switch_can_be_awaited_and_a_step_without_tokens_runs_before_it(
    serve_cold: Callable[..., LiveServed],
) -> None:
    served = serve_cold(graph_mode="NONE", capture_sizes=None)
    assert not served.prepared.wait_until_compiled(timeout_s=0)
    empty = served.prepared(torch.empty(0, HIDDEN), batch=Batch(0, 0))
    assert empty.shape == (0, HIDDEN)
    assert served.prepared.wait_until_compiled()
    assert served.prepared.compiled.from_bundle
    served.step(3, 1)


@pytest.mark.compile
def test_a_child_that_is_killed_ten_times_leaves_serving_alone(
    serve_cold: Callable[..., LiveServed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    all_killed = tmp_path / "all killed"

    def wait_for_all() -> None:
        while not all_killed.exists():
            time.sleep(0.01)

    monkeypatch.setattr(background, "ATTEMPTS", 11)
    monkeypatch.setattr(registry, "entry_points", lambda group: [Texts(wait_for_all)])
    served, seen, wait = serve_cold(), set[int](), 0
    served.prepared.capture()
    while len(seen) < 10:
        served.step(*random.choice(LENGTHS))
        time.sleep(0.003)
        child = child_of(served)
        if child is not None and child not in seen and (wait := wait - 1) < 0:
            assert os.getsid(child) == os.getsid(0)  # in another one its priority has no effect
            seen.add(child)
            os.kill(child, signal.SIGKILL)
            wait = random.randrange(100)
    all_killed.touch()
    serve_until_over(served)
    found = facts(served)
    assert found["state"] == "compiled"
    assert [failure["final"] for failure in found["failures"]] == [False] * 10
    assert "status -9" in found["failures"][0]["reason"]
    served.step(3, 1)


@pytest.mark.compile
def test_after_three_kills_the_model_stays_uncompiled(
    serve_cold: Callable[..., LiveServed], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve_cold()
    while facts(served)["state"] == "compiling":
        served.step(2, 7)
        if (child := child_of(served)) is not None:
            with suppress(ProcessLookupError):  # the one before, which has just been reaped
                os.kill(child, signal.SIGKILL)
    assert [failure["final"] for failure in facts(served)["failures"]] == [False, False, True]
    assert "status -9" in caplog.text
    assert not served.prepared.wait_until_compiled()
    assert served.step(3, 1) == "NONE 4"


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] > 8 else x - 1


@pytest.mark.compile
def test_a_model_that_cannot_be_compiled_is_served_uncompiled(
    serve_cold: Callable[..., LiveServed], caplog: pytest.LogCaptureFixture
) -> None:
    alone: dict[str, Any] = {"splitting_ops": (), "graph_mode": "NONE", "capture_sizes": None}
    served = serve_cold(Branches(), **alone)
    assert not served.prepared.wait_until_compiled()
    (failure,) = facts(served)["failures"]
    assert failure["final"]
    assert "GuardUnproved" in failure["reason"]
    assert "GuardUnproved" in caplog.text
    served.step(3)
    served.step(12)
    with pytest.raises(GuardUnproved):
        serve_cold(Branches(), bundle="use", **alone)


@pytest.mark.compile
def test_a_child_runs_parallel_loops_though_its_parent_did(
    serve_cold: Callable[..., LiveServed], monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = Texts(before=lambda: torch.ones(1 << 20).sum())
    monkeypatch.setattr(registry, "entry_points", lambda group: [parallel])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 20).sum()
        assert serve_cold().prepared.wait_until_compiled(timeout_s=30)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.compile
def test_a_model_that_is_prepared_in_inference_mode_switches(
    serve_cold: Callable[..., LiveServed],
) -> None:
    with torch.inference_mode():
        served = serve_cold()
        assert served.prepared.wait_until_compiled()
        served.step(3, 1)


class Gained(Model):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


@pytest.mark.compile
def test_a_model_that_is_changed_meanwhile_is_compiled_again(
    serve_cold: Callable[..., LiveServed],
) -> None:
    served = serve_cold(Gained())
    served.model.gain = 3.0
    serve_until_over(served)
    (failure,) = facts(served)["failures"]
    assert "model.gain: 2.0 -> 3.0" in failure["reason"]
    assert not failure["final"]
    assert facts(served)["state"] == "compiled"
    served.step(3, 1)


def test_a_signal_to_a_child_is_none_to_the_event_loop_of_its_parent(
    serve_cold: Callable[..., LiveServed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        heard.touch()
        time.sleep(3600)

    monkeypatch.setattr(registry, "entry_points", lambda group: [Texts(interrupt)])
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    loop = signal.set_wakeup_fd(writing)
    try:
        served = serve_cold()
        while not heard.exists():
            time.sleep(0.01)
        served.prepared.close()
    finally:
        signal.set_wakeup_fd(loop)
        signal.signal(signal.SIGUSR1, handler)
        os.close(writing)
    assert signal.SIGUSR1 not in os.read(reading, 100)
    os.close(reading)


@pytest.mark.compile
def test_what_is_buffered_is_written_once(
    serve_cold: Callable[..., LiveServed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chatty = Texts(before=lambda: print("compiling", flush=True))
    monkeypatch.setattr(registry, "entry_points", lambda group: [chatty])
    with (tmp_path / "output.txt").open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        print("before")
        assert serve_cold().prepared.wait_until_compiled()
        print("after")
        monkeypatch.undo()
    lines = (tmp_path / "output.txt").read_text().splitlines()
    assert lines[0] == "before"
    assert lines.count("before") == lines.count("after") == 1
    assert "compiling" in lines


def test_a_child_ends_with_its_parent_though_another_process_keeps_the_connection() -> None:
    """The parent of the child is a fork, of which this process has the end of the connection."""
    ours, theirs = multiprocessing.Pipe()
    if (parent := os.fork()) == 0:
        if os.fork() == 0:
            os.setpgrp()
            theirs.send(os.getpid())
            background._end_with_parent(theirs)
        signal.pause()
    child = ours.recv()
    theirs.close()
    os.kill(child, 0)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        assert ours.poll(60)  # the end of the child closes its side
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with pytest.raises(EOFError):
        ours.recv()


@pytest.mark.compile
def test_who_waits_in_a_thread_is_told_that_the_model_was_closed(
    serve_cold: Callable[..., LiveServed], monkeypatch: pytest.MonkeyPatch
) -> None:
    forever = Texts(before=lambda: time.sleep(3600))
    monkeypatch.setattr(registry, "entry_points", lambda group: [forever])
    wait, stop = background.Background.wait, background.Background.stop
    waiting, ended = threading.Event(), list[Exception]()

    def wait_and_say_so(self: background.Background, timeout_s: float | None) -> Any:
        waiting.set()
        return wait(self, timeout_s)

    def stop_before_the_other_thread_goes_on(self: background.Background) -> None:
        stop(self)
        thread.join()

    monkeypatch.setattr(background.Background, "wait", wait_and_say_so)
    monkeypatch.setattr(background.Background, "stop", stop_before_the_other_thread_goes_on)
    served = serve_cold()

    def wait_until_compiled() -> None:
        try:
            served.prepared.wait_until_compiled()
        except ModelClosed as error:
            ended.append(error)

    thread = threading.Thread(target=wait_until_compiled)
    thread.start()
    assert waiting.wait(60)
    served.prepared.close()
    assert len(ended) == 1
    assert served.prepared.records.of(BackgroundFailure) == []


def test_a_closed_model_leaves_no_child(serve_cold: Callable[..., LiveServed]) -> None:
    served = serve_cold()
    child = child_of(served)
    assert child is not None
    served.prepared.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_process_that_uses_a_device_needs_a_function_that_makes_the_model(
    serve_cold: Callable[..., LiveServed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(InvalidSetting, match="a process that uses a device cannot be forked"):
        serve_cold()


@pytest.mark.compile
def test_what_cannot_be_stored_is_compiled_at_once(
    serve_cold: Callable[..., LiveServed], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve_cold(compiler="eager")
    assert served.prepared.compiled.traced
    assert "compiler 'eager' keeps no artifacts" in caplog.text
    served.step(3, 1)


def serve_on_a_rank(rank: int, folder: Path, serve: Callable[..., LiveServed], lost: bool) -> None:
    """A forked rank: random steps until compiled code serves or all stay uncompiled.

    `lost` kills the child of rank 1.
    """
    torch.set_num_threads(1)
    random.seed(0)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    if lost:
        background.ATTEMPTS = 1
    served = serve(ranks=Ranks(), cache_dir=folder / (f"cache {rank}" if lost else "cache"))
    served.prepared.capture()
    if lost and rank == 1 and (child := child_of(served)) is not None:
        os.kill(child, signal.SIGKILL)
    serve_until_over(served)
    for lengths in LENGTHS:
        served.step(*lengths)
    (folder / f"{rank}.json").write_text(json.dumps(served.prepared.report()))
    served.prepared.close()


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks
@pytest.mark.parametrize("lost", [False, True])
def test_ranks_switch_at_the_same_step_or_not_at_all(
    serve_cold: Callable[..., LiveServed], tmp_path: Path, lost: bool
) -> None:
    fork = multiprocessing.get_context("fork").Process
    ranks = [fork(target=serve_on_a_rank, args=(i, tmp_path, serve_cold, lost)) for i in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    one, other = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    if lost:
        assert {report["background"]["state"] for report in (one, other)} == {"failed"}
        assert (
            "rank 1: the child ended with status -9" in one["background"]["failures"][0]["reason"]
        )
        return
    assert one["background"]["switch"]["steps"] == other["background"]["switch"]["steps"] > 0
    assert [c["num_tokens"] for c in one["captures"]] == [
        c["num_tokens"] for c in other["captures"]
    ]
    phases = [phase["phase"] for report in (one, other) for phase in report["background"]["phases"]]
    assert phases.count("trace.dynamo") == 1  # one child compiled for both
