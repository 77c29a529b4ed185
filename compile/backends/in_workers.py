"""Compile jobs by an executor, the largest first; what it cannot compile is compiled here.

Beside our own pool this process compiles, too, the smallest first. An executor of the program may
cancel what it has begun, so all is left to it as long as it answers. The first error stops the
compilation; pieces that were finished before it are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import Any

import torch

from ...cache import Key
from ...errors import PiecegraphError
from ...torch_compat.basics.settings import process_state
from ...torch_compat.compiling.piece_data import NotData, dump_piece, dump_plain
from ..guards.prover import Ranges
from ..ir.compilation import PieceFn
from ..ir.locations import first_line
from ..passes.graph_pass import SHIPPED
from ..pieces.piece import HANDLE
from ..plan.split_model import SplitModel
from .in_process import compile_here
from .schedule import Job
from .trace_jobs import CompiledJob, TraceJobs, plain_options
from .worker import CompiledPiece, Failed, Machine, Refused, Reply, Task, compile_task

POLL_SECONDS = 0.1
"""How often a wait for replies looks whether the compilation was ended."""
PATIENCE_SECONDS = 60.0
"""After so long without a reply this process does what can be cancelled, one task at a time."""
SILENT_SECONDS = 900.0
"""After so long without a reply it does all."""


class Submitted:
    """Tasks that an executor has, by number of the job."""

    def __init__(self, executor: Executor, tasks: Mapping[int, bytes]) -> None:
        largest_first = sorted(tasks, key=lambda number: -len(tasks[number]))
        self._futures: dict[int, Future[Reply]] = {
            number: executor.submit(compile_task, tasks[number]) for number in largest_first
        }
        self._heard = monotonic()

    def __bool__(self) -> bool:
        return bool(self._futures)

    def __contains__(self, number: int) -> bool:
        return number in self._futures

    def silent_for(self) -> float:
        """Seconds since the last reply."""
        return monotonic() - self._heard

    def take_back(self) -> int | None:
        """The last task that can still be cancelled: the caller does it."""
        for number, future in reversed(self._futures.items()):
            if future.cancel():
                del self._futures[number]
                return number
        return None

    def replies(self, timeout_s: float = 0.0) -> Iterator[tuple[int, Reply]]:
        """What is finished, waiting so long for one; what will never be is Refused."""
        wait(self._futures.values(), timeout_s, FIRST_COMPLETED)
        silent = self.silent_for() > SILENT_SECONDS
        for number, future in tuple(self._futures.items()):
            if future.done() or silent:
                self._heard = monotonic()
                del self._futures[number]
                yield number, _result(future)

    def cancel(self) -> None:
        for future in self._futures.values():
            future.cancel()


def _result(future: Future[Reply]) -> Reply:
    try:
        return future.result(0)
    except TimeoutError:
        return Refused(f"the executor said nothing for {SILENT_SECONDS:.0f} s")
    except (Exception, CancelledError) as error:  # a worker died, or is of another version
        return Refused(f"{type(error).__name__}: {first_line(error)}")


class SharedJobs:
    """Jobs of a trace by number, of which an executor does some."""

    def __init__(
        self, trace: TraceJobs, jobs: Mapping[int, Job], machine: Key, executor: Executor
    ) -> None:
        self._trace = trace
        self._jobs = jobs
        self._not_ours = executor is trace.request.executor
        self._here: dict[int, Job] = {}
        """Those that the executor cannot do."""
        self._replies: dict[int, tuple[CompiledPiece, bool]] = {}
        """Artifacts, and whether their guards are proved."""
        tasks = {}
        asks = machine_of(trace.split, trace.compiler.name, trace.request.device, machine)
        for number, job in jobs.items():
            try:
                tasks[number] = as_task(trace.split, job, asks)
            except NotData as error:
                self._refused(number, str(error))
        self._submitted = Submitted(executor, tasks)

    def compile(self) -> dict[int, CompiledJob]:
        """Compile by the executor, and here at the same time if it is our own pool and this process
        does not serve. Raises PieceFailed and the errors of guards.
        """
        try:
            done = compile_here(self._trace, self._untouched())
            while self._submitted or self._here:
                self._trace.request.checkpoint()
                self._receive(POLL_SECONDS)
                if self._not_ours and self._submitted.silent_for() > PATIENCE_SECONDS:
                    number = self._submitted.take_back()
                    if number is not None:
                        self._refused(number, "the executor does not answer")
                done |= compile_here(self._trace, self._take_here())
        except Exception:
            with suppress(PiecegraphError):  # the first error is raised
                self._receive()
            raise
        finally:
            self._submitted.cancel()
        return done | self._loaded()

    def _untouched(self) -> Iterator[tuple[int, Job]]:
        """What must be compiled here, and what the executor has not begun."""
        yield from self._take_here()
        while not (self._not_ours or self._trace.request.serving):
            self._receive()
            number = self._submitted.take_back()
            if number is None:
                return
            yield number, self._jobs[number]

    def _take_here(self) -> Iterator[tuple[int, Job]]:
        taken, self._here = self._here, {}
        return iter(taken.items())

    def _receive(self, timeout_s: float = 0.0) -> None:
        """Prove, record and store what is finished. Raises PieceFailed, GuardUnproved."""
        for number, reply in self._submitted.replies(timeout_s):
            match reply:
                case Refused():
                    self._refused(number, reply.reason)
                case Failed():
                    error = self._trace.failure(self._jobs[number], reply.reason)
                    raise error from RuntimeError(reply.details)
                case CompiledPiece():
                    self._keep(number, reply)

    def _keep(self, number: int, reply: CompiledPiece) -> None:
        job, events = self._jobs[number], self._trace.request.events

        @cache
        def load() -> PieceFn:
            return self._load([reply])[0]

        for facts in reply.passes:
            events.emit("pass", **facts)
        proved = self._trace.prove(job, load, reply.guards)
        events.past_span("compile.piece", reply.began, reply.seconds, **job.facts(), by="worker")
        self._trace.keep(job, reply.blobs, proved, reply.seconds, by="worker")
        self._replies[number] = reply, proved

    def _loaded(self) -> dict[int, CompiledJob]:
        """What workers compiled, loaded at once."""
        replies = self._replies.values()
        functions = self._load([reply for reply, _ in replies]) if replies else []
        return {
            number: CompiledJob(fn, reply.blobs, proved, reply.seconds)
            for fn, (number, (reply, proved)) in zip(functions, self._replies.items(), strict=True)
        }

    def _load(self, replies: list[CompiledPiece]) -> list[PieceFn]:
        assert self._trace.compiler.load is not None
        return self._trace.compiler.load([reply.blobs for reply in replies])

    def _refused(self, number: int, reason: str) -> None:
        """Note and report that a job is compiled by this process."""
        job = self._here[number] = self._jobs[number]
        facts: dict[str, Any] = {"piece": job.unique.index, "reason": reason}
        self._trace.request.events.emit("compile.here", **facts)


def machine_of(split: SplitModel, compiler: str, device: torch.device, key: Key) -> Machine:
    """What the code of a model is generated for."""
    return Machine(compiler, process_state(), split.config.code, device, key)


def as_task(split: SplitModel, job: Job, machine: Machine, limits: Ranges | None = None) -> bytes:
    """A job, or a library for the ranges `limits`, for any process; raises NotData."""
    graph = job.unique.piece.module(split.trace.graph)
    if any(each not in SHIPPED for each in job.passes):
        raise NotData("a pass is of the program")
    if any(HANDLE in node.meta for node in graph.graph.nodes):
        raise NotData("an input may be an address")
    return dump_plain(
        Task(
            piece=job.unique.index,
            graph=dump_piece(graph, plain_options(split, job, machine.device)),
            machine=machine,
            passes=tuple(each.name for each in job.passes),
            numbers=tuple(job.numbers),
            limits=limits,
        )
    )
