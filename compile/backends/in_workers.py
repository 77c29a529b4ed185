"""Compile jobs in worker processes, the largest first, while this process compiles others.

What a worker cannot compile is compiled here. The first error stops the compilation; pieces that
were finished before it are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from ...cache import Key
from ...errors import PiecegraphError
from ...torch_compat.compiling.piece_data import NotData, dump_piece
from ..guards.prover import Ranges
from ..ir.compilation import PieceFn
from ..passes.graph_pass import SHIPPED
from ..pieces.piece import HANDLE
from ..plan.split_model import SplitModel
from .in_process import compile_here
from .schedule import Job
from .trace_jobs import CompiledJob, TraceJobs, plain_options
from .worker import Compiled, Failed, Machine, Refused, Reply, Task
from .workers import Notice, Workers

POLL_SECONDS = 0.1
"""How often a wait for workers looks whether the compilation was ended."""


class SharedJobs:
    """Jobs of a trace by number, of which workers do some."""

    def __init__(
        self, trace: TraceJobs, jobs: Mapping[int, Job], machine: Key, workers: Workers
    ) -> None:
        self._trace = trace
        self._jobs = jobs
        self._workers = workers
        self._tasks: dict[int, Task] = {}
        """Those without a reply."""
        self._here: dict[int, Job] = {}
        """Those that no worker can do."""
        self._replies: dict[int, tuple[Compiled, bool]] = {}
        """Artifacts, and whether their guards are proved."""
        as_machine = Machine(trace.split.config.code, trace.request.device, machine)
        for number, job in jobs.items():
            try:
                self._tasks[number] = as_task(number, trace.split, job, as_machine)
            except NotData as error:
                self._refused(number, str(error))

    def compile(self) -> dict[int, CompiledJob]:
        """Compile in workers and here at the same time; only in workers where this serves.

        Raises PieceFailed and the errors of guards.
        """
        self._workers.give(sorted(self._tasks.values(), key=lambda task: -len(task.graph)))
        try:
            done = compile_here(self._trace, self._untouched())
            while self._tasks:
                self._trace.request.checkpoint()
                self._receive(self._workers.reply(POLL_SECONDS))
            done |= compile_here(self._trace, self._take_here())
        except Exception:
            with suppress(PiecegraphError):  # the first error is raised
                self._receive_all()
            raise
        return done | self._loaded()

    def _untouched(self) -> Iterator[tuple[int, Job]]:
        """What must be compiled here, and what no worker has begun."""
        yield from self._take_here()
        while not self._trace.request.serving and (task := self._workers.take_back()) is not None:
            self._receive_all()
            del self._tasks[task.number]
            yield task.number, self._jobs[task.number]

    def _take_here(self) -> Iterator[tuple[int, Job]]:
        taken, self._here = self._here, {}
        return iter(taken.items())

    def _receive_all(self) -> None:
        while (message := self._workers.reply()) is not None:
            self._receive(message)

    def _receive(self, message: Notice | tuple[Task, Reply] | None) -> None:
        """Report a notice, or prove, record and store a result. Raises PieceFailed, GuardUnproved.

        A reply to a task that another compilation gave is left out.
        """
        events = self._trace.request.events
        if isinstance(message, Notice):
            events.emit(message.event, level=logging.WARNING, **message.facts)
            return
        if message is None or self._tasks.get(message[0].number) is not message[0]:
            return
        task, reply = message
        del self._tasks[task.number]
        match reply:
            case Refused():
                self._refused(task.number, reply.reason)
            case Failed():
                error = self._trace.failure(self._jobs[task.number], reply.reason)
                raise error from RuntimeError(reply.details)
            case Compiled():
                self._keep(task.number, reply)

    def _keep(self, number: int, reply: Compiled) -> None:
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

    def _load(self, replies: list[Compiled]) -> list[PieceFn]:
        assert self._trace.compiler.load is not None
        return self._trace.compiler.load([reply.blobs for reply in replies])

    def _refused(self, number: int, reason: str) -> None:
        """Note and report that a job is compiled by this process."""
        job = self._here[number] = self._jobs[number]
        facts: dict[str, Any] = {"piece": job.unique.index, "reason": reason}
        self._trace.request.events.emit("compile.here", **facts)


def as_task(
    number: int, split: SplitModel, job: Job, machine: Machine, limits: Ranges | None = None
) -> Task:
    """A job, or a library for the ranges `limits`, for a worker; raises NotData."""
    graph = job.unique.piece.module(split.trace.graph)
    if any(each not in SHIPPED for each in job.passes):
        raise NotData("a pass is of the program")
    if any(HANDLE in node.meta for node in graph.graph.nodes):
        raise NotData("an input may be an address")
    return Task(
        number=number,
        piece=job.unique.index,
        graph=dump_piece(graph, plain_options(split, job, machine.device)),
        machine=machine,
        passes=tuple(each.name for each in job.passes),
        size=job.size,
        limits=limits,
    )
