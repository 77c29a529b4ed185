"""A pool of clean worker processes that generate code for unique pieces, which are data.

It is an executor like any other of `concurrent.futures`. A worker takes seconds to import Inductor,
so the pool is started before the model is traced. There are two workers fewer than cores, for this
process compiles too; where it serves, it only waits, and the workers have a low priority. A worker
that dies is replaced, and its call fails. TORCHINDUCTOR_COMPILE_THREADS limits the
number of cores.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from tempfile import TemporaryFile
from typing import Any, TypeVar

import torch

from ...cache.keys.environment import child_environment
from ...torch_compat.basics.devices import runs_triton
from ...torch_compat.basics.settings import process_state
from ...torch_compat.compiling.piece_data import NotData, dump_plain
from ..ir.compilation import CompileRequest
from .registry import compiler_for
from .worker import ALIVE_SECONDS, get_ready

T = TypeVar("T")
Emit = Callable[..., None]
"""`Events.emit`."""

ATTEMPTS = 3
"""How many workers in turn may end before they are ready."""
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


@contextmanager
def workers_for(request: CompileRequest) -> Iterator[Executor | None]:
    """What compiles beside this process for a model that is about to be traced: the executor of
    the program, or a pool that ends with the block; or None."""
    count = number_of_workers(request.device, request.serving)
    compiler = compiler_for(request)
    if not compiler.in_workers or not (count or request.executor):
        yield None
        return
    if request.executor is not None:
        yield request.executor
        return
    try:
        dump_plain(process_state())
    except NotData as error:  # a setting of torch is an object of the program
        request.events.emit("workers.none", reason=str(error))
        yield None
        return
    ready = partial(get_ready, compiler.name, request.device, NICE if request.serving else 0)
    workers = Workers(count, ready, command(), request.events.emit)
    try:
        yield workers
    finally:
        # memory of a device is read next: that of a worker is given back before
        workers.shutdown(wait=runs_triton(request.device))


def number_of_workers(device: torch.device, serving: bool) -> int:
    """Two fewer than cores; at least one where this process serves; none if one thread may compile.

    This process compiles too. A worker on the second of two cores made a start of three pieces 13 %
    slower. Kernels of Triton are timed on the device when code is generated: one process does it,
    and no other takes the memory of a context (0.4 GB and more). torch's own pool, whose processes
    have none, compiles them.
    """
    cores = min(len(os.sched_getaffinity(0)), 2 if runs_triton(device) else sys.maxsize)
    stated = os.environ.get(THREADS, "")
    if stated.isdigit():
        cores = min(cores, int(stated))
    return max(cores - 2, int(serving)) if cores > 1 or not stated else 0


def command() -> list[str]:
    """What starts a worker: the same Python, which finds modules where this process finds them."""
    places = json.dumps([str(place) for place in sys.path])
    return [sys.executable, "-c", BOOT.format(package=PACKAGE), places]


class Workers(Executor):
    """Worker processes, each fed by a thread.

    A call that raised, or that no worker could finish, ends with RuntimeError. `emit` is told of
    workers that died or say nothing.
    """

    def __init__(
        self, count: int, ready: Callable[[], None], command: Sequence[str], emit: Emit
    ) -> None:
        """`count` processes run `command`, and call `ready` first."""
        self._command = command
        self._environment = child_environment(**{THREADS: "1"})
        self._ready = pickle.dumps((ready, ()))
        self._emit = emit
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._closing, self._close = Pipe(duplex=False)
        """A thread that waits for a worker is woken when the pool is closed."""
        self.processes: list[int] = []
        """Of the workers that run now."""
        threads = [
            threading.Thread(target=self._feed, name="piecegraph-worker", daemon=True)
            for _ in range(count)
        ]
        self._threads = list(threads)
        for thread in threads:
            thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `fn(*args)`, both pickled, in the next worker that is free."""
        call = _Call(pickle.dumps((partial(fn, **kwargs), args)))
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._calls.put(call)
            if not self._threads:
                self._give_up("no worker can be started")
        return call.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """End the processes now; calls that are not finished fail. Idempotent."""
        with self._lock:
            self._closed = True
            self._close.close()
            self._give_up("the pool is closed")
            threads = tuple(self._threads)
        for _ in threads:
            self._calls.put(None)
        for thread in threads if wait else ():
            thread.join()

    def _feed(self) -> None:
        """Give calls to one worker after the other, until none can be started or the end."""
        failures = 0
        while failures < ATTEMPTS and not self._closed:
            call: _Call | None = None
            try:
                with self._process() as worker:
                    returned, reason = pickle.loads(self._wait(worker, "starting"))
                    if not returned:
                        raise EOFError(reason)
                    failures = 0
                    while (call := self._calls.get()) is not None:
                        if call.future.set_running_or_notify_cancel():
                            worker.connection.send_bytes(call.data)
                            call.end(*pickle.loads(self._wait(worker, "working")))
                        call = None
                    worker.end()
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                failures += 1
                reason = f"{type(error).__name__}: {error}"
                self._report("worker.lost", reason=reason)
                if call is not None:
                    call.end(False, reason)
        with self._lock:
            self._threads.remove(threading.current_thread())
            if not self._threads:
                self._give_up("no worker can be started")

    def _give_up(self, reason: str) -> None:
        """End the calls that wait."""
        with suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None and call.future.set_running_or_notify_cancel():
                    call.end(False, reason)

    def _report(self, event: str, **facts: Any) -> None:
        if not self._closed:
            self._emit(event, level=logging.WARNING, **facts)

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
                ours.send_bytes(self._ready)
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
                worker_id = worker.process.pid
                self._report("worker.silent", worker=worker_id, phase=phase, seconds=silent)
        raise EOFError("the pool is closed")


@dataclass(frozen=True)
class _Call:
    data: bytes
    future: Future[Any] = field(default_factory=Future)

    def end(self, returned: bool, result: Any) -> None:
        if returned:
            self.future.set_result(result)
        else:
            self.future.set_exception(RuntimeError(result))


@dataclass(frozen=True)
class _Process:
    process: subprocess.Popen[bytes]
    connection: Connection

    def end(self) -> None:
        """Let an idle worker remove its temporary files; one that does not end is killed later."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
