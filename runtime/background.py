"""Compile in a child process while this process serves the model uncompiled.

The child has a low priority and compiles into the cache. A thread of this process waits for it and
loads the bundle; the model then switches to compiled code between two steps. The child is a fork,
which has the model already, unless a function is given that makes the model again: a process that
uses a device cannot be forked.

Only the forking thread exists in a fork. Thread pools have no threads there, so the work is done in
a new thread, for which OpenMP starts its own pool. Processes are forked by the thread of the model,
at the start or between two steps, when it holds no lock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe

import torch

from ..cache import Key
from ..cache.keys.key import diff
from ..compile.ir.compilation import BundleMiss, ExampleArguments
from ..compile.pipeline import compile_model, find_model
from ..compile.plan.compiled_model import CompiledModel
from ..compile.warm import SHOWN, Loaded, NoBundle
from ..config import BundleUse, Config
from ..errors import InvalidSetting, ModelMismatch
from ..events import Event
from ..torch_compat.basics.modules import allocate_meta_tensors
from ..torch_compat.compiling.inductor import forget_threads
from .after_seal import allow_compilation
from .ranks import Exchange
from .records import BackgroundFailure, BackgroundPhase, Records
from .request import compile_request

ATTEMPTS = 3
"""How many children are started if they are killed. An error of the compiler is final."""

SILENT_SECONDS = 900.0
"""A child that reports nothing for so long is killed."""

NICE = 5
"""Priority of a child: a quarter of a core if steps keep all cores busy."""

STEPS_PER_EXCHANGE = 16
"""How often several ranks compare whether all are ready."""

Factory = Callable[[], torch.nn.Module]


@dataclass(frozen=True)
class Job:
    """What a child compiles. The child must compute the same `key`, else it compiles other code."""

    config: Config
    examples: ExampleArguments | None
    key: Key
    num_threads: int
    with_grad: bool
    inference: bool


class Background:
    """The compilation of one model in child processes."""

    def __init__(
        self,
        missing: NoBundle,
        config: Config,
        records: Records,
        factory: Factory | None,
        exchange: Exchange | None,
    ) -> None:
        """Start a child. `exchange` compares what ranks state, if there are several: they switch
        at the same step. Raises InvalidSetting if the process cannot be forked."""
        request = missing.request
        on_device = request.device.type != "cpu" or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if factory is None and on_device:
            raise InvalidSetting(
                name="bundle",
                value="serve",
                reason="a process that uses a device cannot be forked",
                expected="prepare(..., factory=a function that makes the model), or bundle='use'",
            )
        self.attempt = 0
        self.steps = 0
        self.between_steps = threading.RLock()
        """Held while a step runs, and while a child is started or the model switches."""
        self.over = False
        """Whether the model stays uncompiled, on all ranks."""
        self._missing = missing
        self._job = Job(
            config.changed(bundle=BundleUse.USE),
            request.examples,
            missing.key,
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
        self._records = records
        self._factory = factory
        self._exchange = exchange
        self._began = time.perf_counter()
        self._outcome: Loaded | str = ""
        """The model, or why the last child has not compiled it."""
        self._final = False
        """Whether another child would fail in the same way."""
        self._expired = False
        self._stopped = False
        self._phase = ("", 0)
        self._child: int | None = None
        self._reaping = threading.Lock()
        self._start()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def poll(self) -> CompiledModel | None:
        """The compiled model, once all ranks have loaded it; to be called once before each step.

        `between_steps` is held.
        """
        self.steps += 1
        if self._exchange is not None and self.steps % STEPS_PER_EXCHANGE:
            return None
        return self._ready(expired=False)

    def wait(self, timeout_s: float | None) -> CompiledModel | None:
        """Wait for the compiled model; None if it stays uncompiled or the time has passed.

        With several ranks all must make the same call.
        """
        end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._thread.join(max(0.0, min(1.0, end - time.monotonic())))
            with self.between_steps:
                compiled = self._ready(expired=time.monotonic() >= end)
            if compiled is not None or self.over or self._expired:
                return compiled

    def stop(self) -> None:
        """Kill the child and wait for its end. Idempotent."""
        self._final = self._stopped = True
        self._kill()
        self._thread.join()

    def _ready(self, expired: bool) -> CompiledModel | None:
        failure, compiled = self._failure(), None
        if not failure and isinstance(self._outcome, Loaded):
            try:
                compiled = self._outcome.compiled.rebound()  # weights may have been replaced since
            except ModelMismatch as error:
                failure = str(error)
        ready = compiled is not None
        if self._exchange is not None:
            own = {"ready": ready, "failure": failure, "expired": expired}
            stated = self._exchange("switch to compiled code", own)
            failures = [f"rank {i}: {o['failure']}" for i, o in enumerate(stated) if o["failure"]]
            failure = "; ".join(failures)
            ready = all(other["ready"] for other in stated)
            expired = any(other["expired"] for other in stated)
        self._expired = expired
        if ready:
            assert isinstance(self._outcome, Loaded)
            agreed = self._missing.agree(self._outcome)
            failure = str(agreed) if isinstance(agreed, BundleMiss) else ""
        if failure:
            self.over = True
            if not self._stopped:
                self._records.add(BackgroundFailure(self.attempt, failure, final=True))
        return compiled if ready and not failure else None

    def _failure(self) -> str:
        """Why this rank has no compiled model and will not have one; starts a child if one was
        killed."""
        if self._thread.is_alive() or isinstance(self._outcome, Loaded):
            return ""
        if self._final or self.attempt >= ATTEMPTS:
            return self._outcome
        self._records.add(BackgroundFailure(self.attempt, self._outcome, final=False))
        self._start()
        return ""

    def _start(self) -> None:
        self.attempt += 1
        self._note("started")
        ours, theirs = Pipe()
        try:
            wait = self._fork(ours, theirs) if self._factory is None else self._spawn(ours, theirs)
        except Exception as error:  # no memory, or what the factory needs cannot be pickled
            self._final = True
            self._outcome = f"no child can be started: {type(error).__name__}: {error}"
            wait = None
        finally:
            theirs.close()
        self._thread = threading.Thread(
            target=self._watch, args=(ours, wait), name="piecegraph-background", daemon=True
        )
        self._thread.start()

    def _fork(self, ours: Connection, theirs: Connection) -> Callable[[], int]:
        model = self._missing.request.model
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # there may be none
                stream.flush()  # else the child writes what is buffered too
        with warnings.catch_warnings():  # Python warns of threads, which this module is about
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                ours.close()
                forget_threads()
                _run(theirs, lambda: model, self._job)
            finally:
                os._exit(0)
        self._child = child
        return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _spawn(self, ours: Connection, theirs: Connection) -> Callable[[], int]:
        places = [place or os.getcwd() for place in sys.path]
        run = f"from {__name__} import main; main({theirs.fileno()})"
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {places!r}; {run}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        self._child = child.pid
        ours.send((self._factory, self._missing.request.device, self._job))
        return child.wait

    def _kill(self) -> None:
        """Kill the child and the compilers that it runs."""
        with self._reaping:
            if self._child is not None:
                for kill in (os.killpg, os.kill):
                    with suppress(ProcessLookupError, PermissionError):
                        kill(self._child, signal.SIGKILL)

    def _watch(self, ours: Connection, wait: Callable[[], int] | None) -> None:
        """Follow the child to its end, then load what it has stored."""
        if wait is None:
            return
        reason, final = self._follow(ours)
        self._kill()  # with the compilers that it may have left behind
        with self._reaping:
            with suppress(ChildProcessError):  # if the program waits for all its children itself
                code = wait()
                reason = f"the child ended with status {code}" if reason is None else reason
            self._child = None
        ours.close()
        if self._stopped:
            self._outcome = "the model was closed"
            return
        try:
            loaded = self._missing.load()  # also after a kill: another process may have stored it
        except Exception as error:
            loaded = BundleMiss(f"{type(error).__name__}: {error}")
        self._final = self._final or final
        none = f"the child is done, and there is no bundle: {loaded}"
        self._outcome = loaded if isinstance(loaded, Loaded) else reason or none

    def _follow(self, ours: Connection) -> tuple[str | None, bool]:
        """Record what the child reports until it ends; what failed, None if it does not say that
        it is done, and whether another child would fail in the same way."""
        while True:
            try:
                if not ours.poll(SILENT_SECONDS):
                    return f"the child reported nothing for {SILENT_SECONDS:.0f} s", False
                message = ours.recv()
            except (EOFError, OSError):
                return None, False
            if "end" in message:
                return message["end"], bool(message["end"])
            self._note(message["phase"])

    def _note(self, phase: str) -> None:
        """Record a phase once, though a child that waits for another process repeats it."""
        if self._phase != (phase, self.attempt):
            self._phase = phase, self.attempt
            self._records.add(BackgroundPhase(phase, self.attempt, round(self.seconds, 3)))


def main(descriptor: int) -> None:
    """A child that is not a fork: receive a function that makes the model, and compile it."""
    connection = Connection(descriptor)
    try:
        factory, device, job = connection.recv()
    except Exception as error:  # such as a function of the program's main module
        connection.send({"end": f"a child cannot find what it was sent: {error}"})
        return

    def make() -> torch.nn.Module:
        model: torch.nn.Module = factory()
        allocate_meta_tensors(model, device)
        return model

    _run(connection, make, job)


def _run(connection: Connection, make: Factory, job: Job) -> None:
    """Compile in a new thread. The child ends with its parent, which closes the connection."""
    # not a session of its own: Linux shares cores equally among sessions, whatever their priority
    with suppress(OSError):
        os.setpgrp()
    with suppress(OSError):
        os.nice(NICE)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)  # that of the parent's event loop
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    worker = threading.Thread(target=_compile, args=(connection, make, job))
    worker.start()
    worker.join()


def _end_with_parent(connection: Connection) -> None:
    """Processes that the parent has forked later may keep the connection open."""
    parent = os.getppid()
    with suppress(EOFError, OSError):
        while os.getppid() == parent and not connection.poll(1.0):
            pass
    os.killpg(0, signal.SIGKILL)


def _compile(connection: Connection, make: Factory, job: Job) -> None:
    """Compile into the cache; report phases, and at the end what went wrong."""
    records, lock = Records(), threading.Lock()
    faults: list[str] = []

    def send(**facts: str) -> None:
        with lock:
            connection.send(facts)

    def report_event(event: Event) -> None:
        if event.name in ("bundle.not_kept", "cache.publish_failed"):
            faults.append(f"its code cannot be stored: {event.facts['reason']}")
        elif event.name == "compile.end":
            send(phase=f"compiled piece {event.facts['piece']}")
        elif event.name == "cache.wait":
            send(phase="another process compiles it")

    records.events.listeners.append(report_event)
    records.events.phase_listeners.append(lambda phase: send(phase=phase))
    try:
        torch.set_num_threads(job.num_threads)
        with (
            torch.inference_mode(job.inference),
            torch.set_grad_enabled(job.with_grad),
            allow_compilation(),
        ):
            request = compile_request(make(), job.config, records, job.examples)
            bundle = find_model(request)
            if isinstance(bundle, NoBundle):
                if differences := diff(job.key.factors, bundle.key.factors):
                    shown = "; ".join(map(str, differences[:SHOWN]))
                    faults.append(f"the model of the factory has another key: {shown}")
                else:
                    compile_model(request)
        send(end="; ".join(dict.fromkeys(faults)))
    except Exception as error:
        send(end=f"{type(error).__name__}: {error}")
