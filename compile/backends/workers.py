"""A pool of clean worker processes that generate code for unique pieces, which are data.

A worker takes seconds to import Inductor, so the pool is started before the model is traced. There
are two workers fewer than cores, for this process compiles too; where it serves, it only waits, and
the workers have a low priority. A worker that dies is replaced, and a piece that was not compiled
after some attempts is compiled here. TORCHINDUCTOR_COMPILE_THREADS limits the number of cores.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from tempfile import TemporaryFile
from typing import Any

from ...cache.keys.environment import child_environment
from ...torch_compat.basics.settings import process_state
from ...torch_compat.compiling.piece_data import NotData, dump_plain
from ..ir.compilation import CompileRequest
from .registry import compiler_for
from .worker import ALIVE_SECONDS, Refused, Reply, Start, Task

ATTEMPTS = 3
"""How often a piece is given to a worker that then dies, before it is compiled here."""
NAMED_SECONDS = 10.0
"""A worker that says nothing for so long is named in an event."""
SILENT_SECONDS = 120.0
"""A worker that says nothing for so long is replaced."""
END_SECONDS = 3.0
NICE = 10
"""Priority of workers beside steps."""
THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
PACKAGE = __name__.partition(".")[0]
BOOT = """import sys, json
sys.path[:] = json.loads(sys.argv[1])
from {package}.compile.backends.worker import main
main()"""


@dataclass(frozen=True)
class Notice:
    """Something that the user of the pool reports as an event."""

    event: str
    facts: dict[str, Any]


@contextmanager
def workers_for(request: CompileRequest) -> Iterator[Workers | None]:
    """The pool for a model that is about to be traced, or None; they end with the block."""
    count = number_of_workers(request.serving)
    code = request.config.code
    compiler = compiler_for(code, request.dump_dir, request.cache, request.events)
    if not (compiler.in_workers and count):
        yield None
        return
    try:
        nice = NICE if request.serving else 0
        start = dump_plain(Start(compiler.name, process_state(), request.device, nice))
    except NotData as error:  # a setting of torch is an object of the program
        request.events.emit("workers.none", reason=str(error))
        yield None
        return
    workers = Workers(count, start, command())
    try:
        yield workers
    finally:
        workers.close()


def number_of_workers(serving: bool) -> int:
    """Two fewer than cores; at least one where this process serves; none if one thread may compile.

    This process compiles too. A worker on the second of two cores made a start of three pieces 13 %
    slower.
    """
    cores = len(os.sched_getaffinity(0))
    stated = os.environ.get(THREADS, "")
    if stated.isdigit():
        cores = min(cores, int(stated))
    return max(cores - 2, int(serving)) if cores > 1 or not stated else 0


def command() -> list[str]:
    """What starts a worker: the same Python, which finds modules where this process finds them."""
    places = json.dumps([str(place) for place in sys.path])
    return [sys.executable, "-c", BOOT.format(package=PACKAGE), places]


class Workers:
    """Worker processes, each fed by a thread. Give tasks, then read the replies of all of them."""

    def __init__(self, count: int, start: bytes, command: Sequence[str]) -> None:
        """`count` processes run `command`, are sent `start`, and say when they are ready."""
        self._start = start
        self._command = command
        self._environment = child_environment(**{THREADS: "1"})
        self._waiting: deque[Task] = deque()
        self._attempts: dict[int, int] = {}
        self._changed = threading.Condition()
        self._replies: queue.SimpleQueue[Notice | tuple[Task, Reply]] = queue.SimpleQueue()
        self._closed = False
        self._closing, self._close = Pipe(duplex=False)
        """A thread that waits for a worker is woken when the pool is closed."""
        self._alive = count
        self.processes: list[int] = []
        """Of the workers that run now."""
        for _ in range(count):
            threading.Thread(target=self._feed, name="piecegraph-worker", daemon=True).start()

    def give(self, tasks: list[Task]) -> None:
        """Let workers begin with these, in their order. Replaces tasks that wait."""
        with self._changed:
            self._waiting = deque(tasks)
            self._attempts = {task.number: 0 for task in tasks}
            self._changed.notify_all()
            if not self._alive:
                self._give_up()

    def take_back(self) -> Task | None:
        """The next task that no worker has begun: the caller does it."""
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def reply(self, timeout_s: float = 0.0) -> Notice | tuple[Task, Reply] | None:
        """The next reply to a task, or notice; None if there is none in this time."""
        with suppress(queue.Empty):
            return self._replies.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        """End the processes now and leave out what was not compiled. Idempotent."""
        with self._changed:
            self._closed = True
            self._close.close()
            self._waiting.clear()
            self._changed.notify_all()

    def _next(self) -> Task | None:
        """Wait for a task; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            return None if self._closed else self._waiting.popleft()

    def _feed(self) -> None:
        """Give tasks to one worker after the other, until none can be started or the end."""
        failures = 0
        while failures < ATTEMPTS and not self._closed:
            task = None
            try:
                with self._process() as worker:
                    self._wait(worker, "starting")
                    failures = 0
                    while (task := self._next()) is not None:
                        worker.connection.send_bytes(pickle.dumps(task))
                        reply: Reply = pickle.loads(self._wait(worker, f"piece {task.piece}"))
                        self._replies.put((task, reply))
                        task = None
                    worker.end()
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                failures += 1
                self._report("worker.lost", reason=f"{type(error).__name__}: {error}")
                if task is not None:
                    self._lost(task)
        with self._changed:
            self._alive -= 1
            if not self._alive:
                self._give_up()

    def _lost(self, task: Task) -> None:
        with self._changed:
            attempts = self._attempts[task.number] = self._attempts.get(task.number, 0) + 1
            if attempts < ATTEMPTS and not self._closed:
                self._waiting.appendleft(task)
                self._changed.notify()
            else:
                self._replies.put((task, Refused(f"{attempts} workers died of it")))

    def _give_up(self) -> None:
        while self._waiting:
            self._replies.put((self._waiting.popleft(), Refused("no worker can be started")))

    def _report(self, event: str, **facts: Any) -> None:
        if not self._closed:
            self._replies.put(Notice(event, facts))

    @contextmanager
    def _process(self) -> Iterator[_Process]:
        """A worker, in a session of its own; it and the compilers that it runs are killed.

        An error names the last line that the worker has written to its standard error.
        """
        ours, theirs = Pipe()
        with ours, TemporaryFile() as written:
            with theirs:
                process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=written,
                    env=self._environment,
                    start_new_session=True,
                )
            self.processes.append(process.pid)
            try:
                ours.send_bytes(self._start)
                yield _Process(process, ours)
            except (OSError, EOFError) as error:
                written.seek(0)
                lines = written.read().decode(errors="replace").split("\n")
                said = next((line for line in reversed(lines) if line), str(error))
                raise EOFError(f"the worker has ended: {said}") from error
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.processes.remove(process.pid)

    def _wait(self, worker: _Process, phase: str) -> bytes:
        """The next message of a worker that is more than a sign of life.

        Raises EOFError at the end of the worker or of the pool, TimeoutError if it is silent.
        """
        heard, named = time.monotonic(), False
        while not self._closed:
            if worker.connection in wait([worker.connection, self._closing], ALIVE_SECONDS):
                if message := worker.connection.recv_bytes():
                    return message
                heard, named = time.monotonic(), False
            silent = time.monotonic() - heard
            if silent > SILENT_SECONDS:
                raise TimeoutError(f"worker {worker.process.pid} is silent for {silent:.0f} s")
            if silent > NAMED_SECONDS and not named:
                named = True
                self._report(
                    "worker.silent", worker=worker.process.pid, phase=phase, seconds=silent
                )
        raise EOFError("the pool is closed")


@dataclass(frozen=True)
class _Process:
    process: subprocess.Popen[bytes]
    connection: Connection

    def end(self) -> None:
        """Let an idle worker remove its temporary files; one that does not end is killed later."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
