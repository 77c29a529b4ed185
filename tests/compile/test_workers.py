"""Worker processes: the pool with workers that do nothing, and real workers that compile."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph import compile_ahead
from piecegraph.compile import ahead
from piecegraph.compile.backends import in_workers, inductor
from piecegraph.compile.backends import workers as pool
from piecegraph.compile.backends.in_workers import Submitted, machine_of
from piecegraph.compile.backends.worker import (
    CompiledPiece,
    Failed,
    Refused,
    Task,
    compile_task,
    get_ready,
)
from piecegraph.compile.backends.workers import Workers, command, number_of_workers
from piecegraph.compile.bundle.key_factors import machine_key
from piecegraph.compile.guards.trace_with_guards import trace_with_guards
from piecegraph.compile.ir.compilation import KERNEL
from piecegraph.compile.plan.split_model import split_model
from piecegraph.config import Config
from piecegraph.events import Events
from piecegraph.torch_compat.compiling.piece_data import NotData, dump_piece, dump_plain
from piecegraph.torch_compat.tracing.dynamo import reasoning_about_sizes

from . import ops as _registers  # noqa: F401
from .models import MIX, Stack, X, assert_right
from .starts import CPU, request_of

pytestmark = pytest.mark.compile

STUB = [sys.executable, str(Path(__file__).with_name("stub_worker.py"))]


class Pool(Workers):
    """Workers of which `ask` submits a question that `stub_worker` answers."""

    def __init__(self, count=1, program=STUB):
        self.events = Events()
        super().__init__(count, print, program, self.events.emit)

    def ask(self, *questions):
        return [self.submit(print, each) for each in questions]

    def lost(self):
        return [event.facts["reason"] for event in self.events.named("worker.lost")]


@pytest.fixture
def stubs():
    """`stubs(count, program)`: a pool of workers without torch, which ends with the test."""
    made = []

    def make(*args):
        made.append(Pool(*args))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
        assert not each.processes


def test_a_worker_has_nothing_open_but_its_pipe(stubs, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, (tmp_path / "log").open("w") as log:
        for each in (server.fileno(), log.fileno()):
            os.set_inheritable(each, True)
        workers = stubs()
        *standard, count = workers.ask("descriptors")[0].result(60)
        port = server.getsockname()[1]
    assert standard[0] == "/dev/null"
    assert standard[1].endswith("(deleted)")  # of its standard error
    assert standard[2].startswith("socket:")
    assert int(count) == 5  # its copy of the pipe, and the directory that it lists
    with socket.create_server(("127.0.0.1", port)):  # free while the worker lives
        assert workers.processes


def test_each_call_ends_though_thirty_workers_are_killed(stubs):
    workers, killed = stubs(2), set[int]()
    while len(killed) < 30:
        calls = workers.ask(*["work"] * 4)
        wait(calls[:1], 60)
        for process in set(workers.processes) - killed:
            killed.add(process)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _, pending = wait(calls, 60)
        assert not pending
    assert workers.ask("work")[0].result(60)


def test_the_call_of_a_worker_that_dies_fails_and_the_next_is_done(stubs):
    workers = stubs()
    died, done = workers.ask("die", "work")
    assert isinstance(died.exception(60), RuntimeError)
    assert done.result(60)
    assert len(workers.lost()) == 1


def test_the_error_of_a_worker_that_cannot_start_is_quoted(stubs):
    workers = stubs(1, [sys.executable, "-c", "import no_such_module"])
    with pytest.raises(RuntimeError, match="no worker can be started"):
        workers.ask("work")[0].result(60)
    reason = "EOFError: the worker has ended: ModuleNotFoundError: No module named 'no_such_module'"
    assert workers.lost() == [reason] * 3


def test_a_silent_worker_is_named_and_replaced(stubs, monkeypatch):
    monkeypatch.setattr(pool, "ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(pool, "NAMED_SECONDS", 0.1)
    monkeypatch.setattr(pool, "SILENT_SECONDS", 4.0)
    workers = stubs()
    stopped, done = workers.ask("stop", "work")
    with pytest.raises(RuntimeError, match="is silent for"):
        stopped.result(60)
    assert done.result(60)
    assert "working" in [e.facts["phase"] for e in workers.events.named("worker.silent")]


def test_what_cannot_be_started_fails_every_call(stubs):
    workers = stubs(2, ["/nonexistent/python"])
    for calls in (workers.ask("work", "work"), workers.ask("work")):
        for call in calls:
            with pytest.raises(RuntimeError, match="no worker can be started"):
                call.result(60)


def test_what_no_worker_has_begun_can_be_taken_back(stubs):
    workers = stubs(1, [sys.executable, "-c", "import time; time.sleep(60)"])
    submitted = Submitted(Asking(workers), {1: b"work", 3: b"more work", 2: b"some"})
    assert [submitted.take_back() for _ in range(4)] == [2, 1, 3, None]


def test_an_executor_that_says_nothing_loses_its_tasks(stubs, monkeypatch):
    monkeypatch.setattr(in_workers, "SILENT_SECONDS", 0.2)
    submitted, said = Submitted(Asking(stubs()), {1: b"stop"}), list[Any]()
    while submitted:
        said += submitted.replies(0.05)
    assert said == [(1, Refused("the executor said nothing for 0 s"))]


class Asking(Executor):
    """Asks a pool what a task says."""

    def __init__(self, workers):
        self.submit = lambda fn, data: workers.ask(data.decode())[0]


def test_closing_ends_processes_and_calls(stubs, monkeypatch):
    monkeypatch.setattr(pool, "ALIVE_SECONDS", 600.0)
    workers = stubs(2)
    for done in workers.ask("work", "work"):
        done.result(60)
    started = list(workers.processes)
    stopped, *waiting = workers.ask("stop", "stop", "work", "work")
    while not stopped.running():
        time.sleep(0.01)
    workers.shutdown()
    assert not [each for each in started if Path(f"/proc/{each}").exists()]
    for call in (stopped, *waiting):
        with pytest.raises(RuntimeError, match="closed"):
            call.result(60)
    with pytest.raises(RuntimeError, match="closed"):
        workers.ask("work")


@pytest.mark.parametrize(
    ("cores", "stated", "serving", "count"),
    [
        (1, "", False, 0),
        (1, "", True, 1),
        (2, "", False, 0),
        (2, "", True, 1),
        (8, "", False, 6),
        (8, "3", False, 1),
        (8, "1", True, 0),
        (2, "8", True, 1),
        (8, "many", False, 6),
    ],
)
def test_two_cores_are_for_the_process_itself(monkeypatch, cores, stated, serving, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setenv(pool.THREADS, stated)
    assert number_of_workers(torch.device("cpu"), serving) == count
    assert number_of_workers(torch.device("cuda"), serving) == (serving and stated != "1")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_compiles_beside_the_process_on_a_device_when_the_block_ends(monkeypatch, device):
    request = SimpleNamespace(device=torch.device(device), serving=True, executor=None)
    request.config, request.dump_dir, request.cache = SimpleNamespace(code=None), None, None
    request.events, waited = SimpleNamespace(emit=None), list[bool]()
    end = SimpleNamespace(shutdown=lambda wait: waited.append(wait))
    compiler = SimpleNamespace(in_workers=True, name="inductor")
    monkeypatch.delenv(pool.THREADS, raising=False)
    monkeypatch.setattr(pool, "compiler_for", lambda *_: compiler)
    monkeypatch.setattr(pool, "Workers", lambda *_: end)
    with pool.workers_for(request) as workers:
        assert workers is end
    assert waited == [device == "cuda"]


# real workers


class Ops(nn.Module):
    """A piece of torch's ops between two that hold an op of this program."""

    def forward(self, x):
        out = torch.empty_like(x)
        torch.ops.piecegraph_test.mix(x * 2, out, "layer")
        x = out.exp() + x.shape[0]
        torch.ops.piecegraph_test.turn(x, out)
        return x


@pytest.fixture(scope="module")
def split():
    """Of a model whose first piece is of torch's ops; the second is not."""
    request = request_of(Ops(), compiler="inductor", splitting_ops=MIX)
    return split_model(trace_with_guards(request), request.events)[0]


@pytest.fixture(scope="module")
def worker():
    made = Workers(1, partial(get_ready, "inductor", CPU, 3), command(), Events().emit)
    yield made
    made.shutdown()


IN_A_WORKER = pytest.param("worker", marks=pytest.mark.heavy)


@pytest.fixture(params=["this process", IN_A_WORKER])
def reply_of(request, split):
    """`reply_of(index, graph=…)`: what a worker replies, or this process in its place."""

    def reply_of(index, **changes):
        code = split.config.code
        piece = split.unique[index].piece
        graph, any_size = piece.module(split.trace.graph), (None,) * len(piece.symbols())
        machine = machine_of(split, "inductor", CPU, machine_key(code, CPU))
        task = replace(Task(index, dump_piece(graph, {}), machine, (), any_size), **changes)
        if request.param != "worker":
            return compile_task(dump_plain(task))
        worker = request.getfixturevalue("worker")
        return worker.submit(compile_task, dump_plain(task)).result(120)

    return reply_of


def test_code_of_a_worker_equals_that_of_this_process(split, reply_of):
    reply = reply_of(0)
    assert isinstance(reply, CompiledPiece)
    piece = split.unique[0].piece
    with (
        inductor.compiling(),
        reasoning_about_sizes(split.config.code.dynamic_shapes.value),
    ):
        graph = piece.module(split.trace.graph)
        _, expected = inductor.compile_piece(graph, piece.example_values(), {})()
    assert reply.blobs.keys() == expected.keys()
    # a kernel is named by its source; the linker writes the folder of the compile into it
    assert any(name.startswith(KERNEL) for name in expected)


@pytest.mark.heavy
def test_libraries_are_built_by_workers_and_the_rest_here(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setenv(pool.THREADS, "3")
    here, build = list[int](), ahead._library

    def build_here(request, split, job):
        here.append(job.unique.index)
        return build(request, split, job)

    monkeypatch.setattr(ahead, "_library", build_here)
    config, events = Config(inputs=X, splitting_ops=MIX, cache_dir=tmp_path), Events()
    assert compile_ahead(Ops(), config, events=events)
    assert here == [1]  # it has an op of this program
    assert events.counters["library_compiles"] == 2
    assert compile_ahead(Ops(), config, events=events)
    assert events.counters["library_compiles"] == 2


@pytest.mark.heavy
def test_a_library_that_a_worker_cannot_build_is_reported(tmp_path):
    config, events = Config(inputs=X, splitting_ops=MIX, cache_dir=tmp_path), Events()
    assert not compile_ahead(Ops(), config, events=events, executor=Failing())
    (failed,) = events.named("compile.library_failed")
    assert failed.facts["piece"] == 0
    assert "no such thing" in failed.facts["reason"]


class Failing(Executor):
    """Compiles no piece, and fails at libraries."""

    def submit(self, fn, data):
        future, task = Future[Any](), pickle.loads(data)
        failed = Failed("TypeError: no such thing", "")
        future.set_result(Refused("a test") if task.limits is None or task.piece else failed)
        return future


@pytest.mark.parametrize("reply_of", [IN_A_WORKER], indirect=True)
def test_a_worker_refuses_what_only_the_program_has(reply_of):
    refused = reply_of(1)
    assert isinstance(refused, Refused)
    assert "turn" in refused.reason
    with pytest.raises(NotData, match="test_workers.Ops is of the program"):
        dump_plain([Ops])


def test_a_worker_refuses_what_settings_of_another_process_are_for(split, reply_of):
    key = machine_key(split.config.code, CPU).extended({"settings": "of another process"})
    refused = reply_of(0, machine=replace(machine_of(split, "inductor", CPU, key)))
    assert isinstance(refused, Refused)
    assert "settings" in refused.reason


@pytest.mark.parametrize("reply_of", [IN_A_WORKER], indirect=True)
def test_a_worker_has_handlers_and_priority_of_its_own(worker, reply_of):
    reply_of(1)
    (process,) = worker.processes
    status = Path(f"/proc/{process}/status").read_text()
    blocked, ignored, caught = (
        int(line.split()[1], 16)
        for line in status.splitlines()
        if line.startswith(("SigBlk", "SigIgn", "SigCgt"))
    )
    assert not blocked
    assert not (ignored | caught) & (1 << (signal.SIGTERM - 1) | 1 << (signal.SIGINT - 1))
    assert os.getpriority(os.PRIO_PROCESS, process) >= 3
    assert os.getpgid(process) == process


def test_an_error_of_the_compiler_is_final_and_has_its_traceback(split, reply_of):
    graph = split.unique[0].piece.module(split.trace.graph)
    failed = reply_of(0, graph=dump_piece(graph, {"no_such_option": 1}))
    assert isinstance(failed, Failed)
    assert "no_such_option" in failed.reason
    assert "Traceback" in failed.details


@pytest.mark.heavy
def test_a_start_with_workers_gives_the_numbers_of_one_without(compiled, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setenv(pool.THREADS, "3")
    model = Stack(3)
    made = compiled(
        model, inputs=X, splitting_ops=MIX, compiler="inductor", codegen={"sizes": (2, 3, 5, 8)}
    )
    ends = [event.facts for event in made.events.named("compile.end")]
    assert any(facts.get("by") == "worker" for facts in ends)
    assert_right(made, model)


ENDS = {
    "return": "sys.exit()",
    "_exit": "os._exit(0)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "term": "os.kill(os.getpid(), signal.SIGTERM)",
    "int": "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "exception": "raise ValueError",
    "thread": "threading.Thread(target=os._exit, args=(3,)).start(); time.sleep(9)",
}
PROGRAM = """
import os, signal, sys, threading, time
from functools import partial
import torch
from piecegraph.compile.backends.worker import get_ready
from piecegraph.compile.backends.workers import Workers, command
from piecegraph.events import Events
ready = partial(get_ready, "inductor", torch.device("cpu"), 0)
workers = Workers(1, ready, command(), Events().emit)
while not workers.processes:
    time.sleep(0.01)
if sys.argv[1] == "ready":
    time.sleep(12)
print(workers.processes[0], flush=True)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("moment", ["starting", "ready"])
@pytest.mark.parametrize("end", ENDS)
def test_a_worker_ends_with_its_parent(end, moment):
    program = [sys.executable, "-c", PROGRAM + ENDS[end], moment]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    process = Path(f"/proc/{ended.stdout.strip()}")
    assert ended.stdout.strip(), ended.stderr
    until = time.monotonic() + 60
    while process.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not process.exists()
