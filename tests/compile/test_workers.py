"""Worker processes: the pool with workers that do nothing, and real workers that compile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph import compile_ahead
from piecegraph.cache import Cache
from piecegraph.compile import ahead
from piecegraph.compile.backends import inductor
from piecegraph.compile.backends import workers as pool
from piecegraph.compile.backends.worker import Failed, Machine, Refused, Start, Task
from piecegraph.compile.backends.workers import Notice, Workers, command, number_of_workers
from piecegraph.compile.bundle.key_factors import machine_key
from piecegraph.compile.guards.trace_with_guards import trace_with_guards
from piecegraph.compile.ir.compilation import KERNEL, CompileRequest
from piecegraph.compile.plan.split_model import SplitModel, split_model
from piecegraph.config import Config, compile_config
from piecegraph.events import Events
from piecegraph.torch_compat.basics.settings import process_state
from piecegraph.torch_compat.compiling.piece_data import NotData, dump_piece, dump_plain
from piecegraph.torch_compat.tracing.dynamo import reasoning_about_sizes

from . import ops as _registers  # noqa: F401
from .models import MIX, SIZES, Stack, X
from .starts import CPU

pytestmark = pytest.mark.compile

STUB = [sys.executable, str(Path(__file__).with_name("stub_worker.py"))]


@pytest.fixture
def stubs() -> Iterator[Callable[..., Workers]]:
    """`stubs(count, program)`: a pool of workers without torch, which ends with the test."""
    made: list[Workers] = []

    def make(count: int = 1, program: list[str] = STUB) -> Workers:
        made.append(Workers(count, b"", program))
        return made[-1]

    yield make
    for each in made:
        each.close()
    while any(each.processes for each in made):
        time.sleep(0.01)


def tasks(*pieces: str) -> list[Any]:
    return [SimpleNamespace(number=n, piece=piece, graph=b"") for n, piece in enumerate(pieces)]


def replies(workers: Workers, count: int) -> tuple[dict[int, Any], list[Notice]]:
    """That many replies by number of the task, and the notices before the last of them."""
    done: dict[int, Any] = {}
    notices: list[Notice] = []
    while len(done) < count:
        message = workers.reply(60.0)
        if isinstance(message, Notice):
            notices.append(message)
        elif message is not None:
            done[message[0].number] = message[1]
    return done, notices


def test_a_worker_has_nothing_open_but_its_pipe(stubs, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, (tmp_path / "log").open("w") as log:
        for each in (server.fileno(), log.fileno()):
            os.set_inheritable(each, True)
        workers = stubs()
        workers.give(tasks("descriptors"))
        done, _ = replies(workers, 1)
        port = server.getsockname()[1]
    *standard, count = done[0]
    assert standard[0] == "/dev/null"
    assert standard[1].endswith("(deleted)")  # of its standard error
    assert standard[2].startswith("socket:")
    assert int(count) == 5  # its copy of the pipe, and the directory that it lists
    with socket.create_server(("127.0.0.1", port)):  # free while the worker lives
        assert workers.processes


def test_each_task_has_a_reply_though_thirty_workers_are_killed(stubs, monkeypatch):
    monkeypatch.setattr(pool, "ATTEMPTS", 100)
    workers, killed = stubs(2), set[int]()
    workers.give(tasks(*["work"] * 20))
    done, lost = dict[int, Any](), 0
    while len(done) < 20 or lost < 30:
        for process in set(workers.processes) - killed if len(killed) < 30 else ():
            killed.add(process)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        message = workers.reply(0.05)
        if isinstance(message, Notice):
            lost += message.event == "worker.lost"
        elif message is not None:
            done[message[0].number] = message[1]
    assert sorted(done) == list(range(20))
    assert len(killed) >= 30


def test_a_task_of_which_workers_die_is_given_back_and_named(stubs):
    workers = stubs()
    workers.give(tasks("die"))
    done, notices = replies(workers, 1)
    assert done[0] == Refused("3 workers died of it")
    assert [notice.event for notice in notices] == ["worker.lost"] * 3


def test_the_error_of_a_worker_that_cannot_start_is_quoted(stubs):
    workers = stubs(1, [sys.executable, "-c", "import no_such_module"])
    workers.give(tasks("work"))
    _, notices = replies(workers, 1)
    reason = "EOFError: the worker has ended: ModuleNotFoundError: No module named 'no_such_module'"
    assert [notice.facts["reason"] for notice in notices] == [reason] * 3


def test_a_silent_worker_is_named_and_replaced(stubs, monkeypatch):
    monkeypatch.setattr(pool, "ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(pool, "NAMED_SECONDS", 0.1)
    monkeypatch.setattr(pool, "SILENT_SECONDS", 4.0)
    monkeypatch.setattr(pool, "ATTEMPTS", 1)
    workers = stubs()
    workers.give(tasks("stop"))
    done, notices = replies(workers, 1)
    assert isinstance(done[0], Refused)
    assert ("worker.silent", "piece stop") in [
        (notice.event, notice.facts.get("phase")) for notice in notices
    ]


def test_what_cannot_be_started_gives_every_task_back(stubs):
    workers = stubs(2, ["/nonexistent/python"])
    workers.give(tasks("work", "work"))
    done, _ = replies(workers, 2)
    assert set(done.values()) == {Refused("no worker can be started")}
    workers.give(tasks("work"))
    assert replies(workers, 1)[0] == {0: Refused("no worker can be started")}


def test_what_no_worker_has_begun_can_be_taken_back(stubs):
    workers = stubs(1, [sys.executable, "-c", "import time; time.sleep(60)"])
    first, second = given = tasks("work", "work")
    workers.give(given)
    assert workers.take_back() is first
    assert workers.take_back() is second
    assert workers.take_back() is None


def test_closing_ends_the_processes(stubs):
    workers = stubs(2)
    workers.give(tasks("work", "work"))
    replies(workers, 2)
    started = list(workers.processes)
    workers.close()
    while workers.processes:
        time.sleep(0.01)
    assert not [each for each in started if Path(f"/proc/{each}").exists()]


def test_closing_wakes_who_waits_for_a_busy_worker(stubs, monkeypatch):
    monkeypatch.setattr(pool, "ALIVE_SECONDS", 600.0)
    workers = stubs()
    workers.give(tasks("stop"))
    while workers.take_back() is not None or not workers.processes:
        workers.give(tasks("stop"))
        time.sleep(0.05)
    workers.close()
    while workers.processes:
        time.sleep(0.01)


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
    assert number_of_workers(serving) == count


# real workers


class Ops(nn.Module):
    """A piece of torch's ops between two that hold an op of this program."""

    def forward(self, x: Any) -> Any:
        out = torch.empty_like(x)
        torch.ops.piecegraph_test.mix(x * 2, out, "layer")
        x = out.exp() + x.shape[0]
        torch.ops.piecegraph_test.turn(x, out)
        return x


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Workers, SplitModel]]:
    """One worker, and a model whose first piece is of torch's ops; the second is not."""
    config, events = compile_config(Config(inputs=X, splitting_ops=MIX)), Events()
    request = CompileRequest(Ops(), config, Cache(None, events), events, CPU)
    start = dump_plain(Start("inductor", process_state(), CPU, nice=3))
    workers = Workers(1, start, command())
    yield workers, split_model(trace_with_guards(request), events)[0]
    workers.close()
    while workers.processes:
        time.sleep(0.01)


def task_of(split: SplitModel, index: int, **changes: Any) -> Task:
    code = split.config.code
    graph = split.unique[index].piece.module(split.trace.graph)
    machine = Machine(code, CPU, machine_key(code, CPU))
    return replace(Task(0, index, dump_piece(graph, {}), machine, ()), **changes)


def test_code_of_a_worker_equals_that_of_this_process(real):
    workers, split = real
    workers.give([task_of(split, 0)])
    blobs = replies(workers, 1)[0][0].blobs
    piece = split.unique[0].piece
    with (
        inductor.compiling(),
        reasoning_about_sizes(split.config.code.dynamic_shapes.value),
    ):
        graph = piece.module(split.trace.graph)
        _, expected = inductor.compile_piece(graph, piece.example_values(), {})()
    assert blobs.keys() == expected.keys()
    # a kernel is named by its source; the linker writes the folder of the compile into it
    assert any(name.startswith(KERNEL) for name in expected)


@pytest.mark.heavy
def test_libraries_are_built_by_workers_and_the_rest_here(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setenv(pool.THREADS, "3")
    here, build = list[int](), ahead._library

    def build_here(request: Any, split: Any, job: Any) -> bytes:
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
def test_a_library_that_a_worker_cannot_build_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(ahead, "workers_for", lambda request: nullcontext(Failing()))
    config, events = Config(inputs=X, splitting_ops=MIX, cache_dir=tmp_path), Events()
    assert not compile_ahead(Ops(), config, events=events)
    (failed,) = events.named("compile.library_failed")
    assert failed.facts["piece"] == 0
    assert "no such thing" in failed.facts["reason"]


class Failing:
    """A pool that compiles no piece, and fails at libraries."""

    def give(self, given: list[Task]) -> None:
        self.given = given

    def take_back(self) -> None:
        return None

    def reply(self, timeout_s: float = 0.0) -> Any:
        if not self.given:
            return None
        task = self.given.pop()
        failed = Failed("TypeError: no such thing", "")
        return task, Refused("a test") if task.limits is None or task.piece else failed


@pytest.mark.heavy
def test_a_worker_refuses_what_only_the_program_has(real):
    workers, split = real
    other = task_of(split, 0).machine
    key = other.key.extended({"settings": "of another process"})
    workers.give([task_of(split, 1)])
    refused = replies(workers, 1)[0][0]
    assert isinstance(refused, Refused)
    assert "turn" in refused.reason
    workers.give([task_of(split, 0, machine=replace(other, key=key))])
    refused = replies(workers, 1)[0][0]
    assert "settings" in refused.reason
    with pytest.raises(NotData, match="test_workers.Ops is of the program"):
        dump_plain([Ops])


@pytest.mark.heavy
def test_a_worker_has_handlers_and_priority_of_its_own(real):
    workers, split = real
    workers.give([task_of(split, 1)])
    replies(workers, 1)
    (process,) = workers.processes
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


@pytest.mark.heavy
def test_an_error_of_the_compiler_is_final_and_has_its_traceback(real):
    workers, split = real
    graph = split.unique[0].piece.module(split.trace.graph)
    data = dump_piece(graph, {"no_such_option": 1})
    workers.give([task_of(split, 0, graph=data)])
    failed = replies(workers, 1)[0][0]
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
    for size in SIZES:
        x = torch.randn(size, 8)
        torch.testing.assert_close(made(x), model(x).detach())


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
import torch
from piecegraph.compile.backends.worker import Start
from piecegraph.compile.backends.workers import Workers, command
from piecegraph.torch_compat.basics.settings import process_state
from piecegraph.torch_compat.compiling.piece_data import dump_plain
start = dump_plain(Start("inductor", process_state(), torch.device("cpu"), 0))
workers = Workers(1, start, command())
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
