"""Compile unique pieces: run the jobs of a schedule.

Worker processes compile pieces in parallel, the largest first, and this process takes part: here
one piece after the other, since torch's standalone compile is not thread-safe. What a worker cannot
compile is compiled here. The first error stops the compilation; pieces that were finished before it
are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import sympy
import torch

from ...cache import Entry, Key
from ...cache.keys.factors import Json
from ...errors import PieceFailed, PiecegraphError
from ...events import Events
from ...torch_compat.basics.symbolic import Located
from ...torch_compat.compiling.piece_data import NotData, dump_piece
from ...torch_compat.tracing.dynamo import reasoning_about_sizes
from ..guards.numerics_check import numeric_difference, static_inputs
from ..guards.prover import Ranges
from ..ir.compilation import Blobs, Compiler, CompileRequest, PieceBuilt, PieceFn, kernels
from ..ir.locations import first_line, node_location
from ..ir.plan import CompiledRange
from ..passes.graph_pass import SHIPPED, inductor_passes
from ..pieces.piece import HANDLE
from ..plan.split_model import SplitModel, UniquePiece
from .schedule import Job, schedule
from .worker import Compiled as CompiledInWorker
from .worker import Failed, Machine, Refused, Reply, Task
from .workers import Notice, Workers

POLL_SECONDS = 0.1
"""How often a wait for workers looks whether the compilation was ended."""


@dataclass(frozen=True)
class CompiledJob:
    """A finished job. It may be stored if all its guards are `proved` for the served ranges."""

    fn: PieceFn
    blobs: Blobs
    proved: bool
    seconds: float
    """Compile time, of this process or of the one that stored it."""


@dataclass(frozen=True)
class Compiled:
    """The results of all jobs of a model, the trace and the job that each was compiled from first,
    and for each trace which results serve its ranges."""

    results: list[CompiledJob]
    jobs: list[tuple[SplitModel, Job]]
    ranges: list[list[CompiledRange]]


def compile_pieces(
    request: CompileRequest,
    splits: Sequence[SplitModel],
    compiler: Compiler,
    workers: Workers | None = None,
) -> Compiled:
    """Load or compile the pieces of each trace of a model; equal pieces of several traces once.

    Raises PieceFailed and the errors of guards.
    """
    compiled = Compiled([], [], [])
    numbers: dict[str, int] = {}
    # the largest sizes first: code for equal pieces may depend on the size that was traced
    for split in reversed(splits):
        with request.events.span("compile", level=logging.INFO, pieces=len(split.unique)):
            request.checkpoint()
            for unique in split.unique:
                piece = unique.piece.module(split.trace.graph)
                split.guards_of(unique).check_ends(piece, f"piece {unique.index}")
            plan = schedule(split, request.device)
            names = [
                f"{job.key.digest} for {job.served}" if job.key else f"{len(compiled.ranges)} {n}"
                for n, job in enumerate(plan.jobs)
            ]
            new = {n: job for n, job in enumerate(plan.jobs) if names[n] not in numbers}
            done = _compile_trace(request, split, compiler, new, plan.machine, workers)
        for number, result in sorted(done.items()):
            numbers[names[number]] = len(compiled.results)
            compiled.results.append(result)
            compiled.jobs.append((split, plan.jobs[number]))
        ranges = [
            CompiledRange(
                low=interval.low,
                high=interval.high,
                artifacts=tuple(numbers[names[number]] for number in jobs),
            )
            for interval, jobs in plan.ranges
        ]
        compiled.ranges.insert(0, ranges)
    return compiled


def _compile_trace(
    request: CompileRequest,
    split: SplitModel,
    compiler: Compiler,
    jobs: Mapping[int, Job],
    machine: Key | None,
    workers: Workers | None,
) -> dict[int, CompiledJob]:
    """Load or compile jobs of a trace, by number."""
    results = {number: _load(request, job, compiler) for number, job in jobs.items()}
    missing = {number: jobs[number] for number, result in results.items() if result is None}
    request.events.emit("compile.jobs", jobs=len(missing), stored=len(results) - len(missing))
    if workers is not None and machine is not None:
        results.update(_share(request, split, compiler, missing, machine, workers))
    else:
        results.update(_compile_here(request, split, compiler, iter(missing.items())))
    return {number: result for number, result in results.items() if result is not None}


def _load(request: CompileRequest, job: Job, compiler: Compiler) -> CompiledJob | None:
    """The stored artifact of a job, if there is one that was proved for the served ranges."""
    if compiler.load is None or job.key is None:
        return None
    entry = request.cache.lookup("artifact", job.key)
    request.record_lookup("artifact", job.key, entry)
    if not isinstance(entry, Entry) or not _covers(entry.meta.get("ranges"), job.served):
        return None
    try:
        (fn,) = compiler.load([entry.contents])
    except Exception as error:  # code of another system or compiler
        reason = f"it cannot be loaded: {type(error).__name__}: {error}"
        request.events.emit(
            "artifact.refused", level=logging.WARNING, piece=job.unique.index, reason=reason
        )
        return None
    seconds = entry.meta.get("compile_seconds")
    seconds = float(seconds) if isinstance(seconds, (int, float)) else 0.0
    return CompiledJob(fn, entry.contents, proved=True, seconds=seconds)


def _covers(proved: Any, served: Sequence[Any]) -> bool:
    """Whether the ranges proved for an artifact contain the served ranges."""
    return (
        isinstance(proved, list)
        and len(proved) == len(served)
        and all(
            isinstance(span, list) and span[0] <= low and high <= span[1]
            for span, (low, high) in zip(proved, served, strict=True)
        )
    )


def store_artifact(request: CompileRequest, job: Job, result: CompiledJob) -> None:
    """Store the artifact of a job with the ranges over which its guards are proved."""
    if job.key is not None and result.blobs and result.proved:
        meta: dict[str, Json] = {"compile_seconds": result.seconds, "ranges": job.served}
        request.publish("artifact", job.key, meta, result.blobs)


def _share(
    request: CompileRequest,
    split: SplitModel,
    compiler: Compiler,
    jobs: dict[int, Job],
    machine: Key,
    workers: Workers,
) -> dict[int, CompiledJob]:
    """Compile jobs in workers and here at the same time; only in workers where this serves."""
    shared = _Shared(request, split, compiler, jobs)
    shared.divide(machine)
    workers.give(sorted(shared.tasks.values(), key=lambda task: -len(task.graph)))

    def untouched() -> Iterator[tuple[int, Job]]:
        """What must be compiled here, and what no worker has begun."""
        yield from [(number, jobs[number]) for number in shared.here]
        while not request.serving and (task := workers.take_back()) is not None:
            shared.receive_all(workers)
            yield task.number, shared.take(task)

    done: dict[int, CompiledJob] = {}
    try:
        done |= _compile_here(request, split, compiler, untouched())
        while shared.tasks:
            request.checkpoint()
            shared.receive(workers.reply(POLL_SECONDS))
        done |= _compile_here(request, split, compiler, iter(shared.refused.items()))
    except Exception:
        with suppress(PiecegraphError):  # the first error is raised
            shared.receive_all(workers)
        raise
    return done | shared.load()


@dataclass
class _Shared:
    """Jobs of a model that are compiled in workers, by number."""

    request: CompileRequest
    split: SplitModel
    compiler: Compiler
    jobs: dict[int, Job]
    tasks: dict[int, Task] = field(default_factory=dict)
    """Those without a reply."""
    here: list[int] = field(default_factory=list)
    refused: dict[int, Job] = field(default_factory=dict)
    finished: dict[int, CompiledJob] = field(default_factory=dict)

    def divide(self, machine: Key) -> None:
        """Describe each job as a task; `here` are those that cannot be described."""
        as_machine = Machine(self.split.config.code, self.request.device, machine)
        for number, job in self.jobs.items():
            try:
                self.tasks[number] = as_task(number, self.split, job, as_machine)
            except NotData as error:
                self._here(job, str(error))
                self.here.append(number)

    def take(self, task: Task) -> Job:
        del self.tasks[task.number]
        return self.jobs[task.number]

    def receive_all(self, workers: Workers) -> None:
        while (message := workers.reply()) is not None:
            self.receive(message)

    def receive(self, message: Notice | tuple[Task, Reply] | None) -> None:
        """Report a notice, or prove, record and store a result. Raises PieceFailed, GuardUnproved.

        A reply to a task that another compilation gave is left out.
        """
        if isinstance(message, Notice):
            self.request.events.emit(message.event, level=logging.WARNING, **message.facts)
            return
        if message is None or self.tasks.get(message[0].number) is not message[0]:
            return
        task, reply = message
        job = self.take(task)
        match reply:
            case Refused():
                self._here(job, reply.reason)
                self.refused[task.number] = job
            case Failed():
                raise PieceFailed(
                    compiler=self.compiler.name,
                    piece=job.unique.index,
                    digest=job.unique.digest[:12],
                    reason=reply.reason,
                ) from RuntimeError(reply.details)
            case CompiledInWorker():
                self.finished[task.number] = self._finish(task, job, reply)

    def load(self) -> dict[int, CompiledJob]:
        """The finished jobs, loaded at once."""
        if not self.finished:
            return {}
        assert self.compiler.load is not None
        loaded = self.compiler.load([result.blobs for result in self.finished.values()])
        results = zip(self.finished.items(), loaded, strict=True)
        return {number: replace(result, fn=fn) for (number, result), fn in results}

    def _finish(self, task: Task, job: Job, reply: CompiledInWorker) -> CompiledJob:
        events = self.request.events

        @cache
        def load() -> PieceFn:
            assert self.compiler.load is not None
            return self.compiler.load([reply.blobs])[0]

        for facts in reply.passes:
            events.emit("pass", **facts)
        proved = _prove(self.split, job.unique, load, reply.guards)
        result = CompiledJob(_not_loaded, reply.blobs, proved, reply.seconds)
        facts = {**_facts(job), "by": "worker"}
        events.past_span("compile.piece", reply.began, reply.seconds, **facts)
        _record(self.request, self.compiler, job, result, facts)
        return result

    def _here(self, job: Job, reason: str) -> None:
        """Report why a job is compiled by this process."""
        self.request.events.emit("compile.here", piece=job.unique.index, reason=reason)


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


def _not_loaded(args: list[Any]) -> Any:
    raise AssertionError("the code of a worker is loaded before it is called")


def _compile_here(
    request: CompileRequest, split: SplitModel, compiler: Compiler, jobs: Iterator[tuple[int, Job]]
) -> dict[int, CompiledJob]:
    """Compile jobs in this process, if there are any."""
    first = next(jobs, None)
    if first is None:
        return {}
    if compiler.first_use is not None:
        compiler.first_use(request.device, request.events)
    results: dict[int, CompiledJob] = {}
    last: dict[int, Callable[[], CompiledJob]] = {}
    with compiler.session():
        for number, job in chain([first], jobs):
            before = last
            try:
                last = {number: _compile(request, split, compiler, number, job)}
            finally:  # it was built while this code was generated
                results |= {number: finish() for number, finish in before.items()}
        return results | {number: finish() for number, finish in last.items()}


def _compile(
    request: CompileRequest, split: SplitModel, compiler: Compiler, number: int, job: Job
) -> Callable[[], CompiledJob]:
    """Generate the code of a copy of the piece, and prove the guards that the compiler adds.

    What it returns waits until the code can run, records and stores. Both raise PieceFailed, and
    this the errors of guards.
    """
    request.checkpoint()
    unique, events, (low, high), facts = job.unique, request.events, job.span, _facts(job)
    graph = unique.piece.module(split.trace.graph)
    title = f"piece {unique.index}, tokens {low} to {high}"
    where = next(filter(None, map(node_location, graph.graph.nodes)), None)
    with events.trace_unit(number + 1, title, where):
        with (
            events.span("compile.piece", piece=unique.index, digest=unique.digest[:12]) as span,
            _naming(compiler, unique),
            reasoning_about_sizes(split.config.code.dynamic_shapes.value),
        ):
            events.emit("compile.start", compiler=compiler.name, **facts)
            options = compiler_options(split, job, request.device, events)
            building = compiler.compile(graph, _inputs(job, graph), options)

        @cache
        def built() -> tuple[PieceFn, Blobs, float]:
            with (
                events.span("compile.kernels", piece=unique.index) as waited,
                _naming(compiler, unique),
            ):
                fn, blobs = building()
            return fn, blobs, span.seconds + waited.seconds

        # now: the next piece adds its guards to the same environment
        proved = _prove(split, unique, lambda: built()[0])

    def finish() -> CompiledJob:
        with events.trace_unit(number + 1, title, where):
            fn, blobs, seconds = built()
            result = CompiledJob(fn, blobs, proved, seconds)
            _record(request, compiler, job, result, facts)
        return result

    return finish


def _facts(job: Job) -> dict[str, Any]:
    return {
        "piece": job.unique.index,
        "digest": job.unique.digest[:12],
        "range": list(job.span),
    }


def _prove(
    split: SplitModel,
    unique: UniquePiece,
    load: Callable[[], PieceFn],
    added: Sequence[Located] = (),
) -> bool:
    """Prove the guards that the compiler added, where it helps by running the compiled code.

    A worker added the guards `added`.
    """

    def run(sizes: Mapping[sympy.Symbol, int]) -> str | None:
        return numeric_difference(load(), unique.piece.module(split.trace.graph), sizes)

    return split.guards_of(unique).prove_new(f"piece {unique.index}", run=run, added=added)


def _record(
    request: CompileRequest,
    compiler: Compiler,
    job: Job,
    result: CompiledJob,
    facts: Mapping[str, Any],
) -> None:
    """Record and store what was compiled."""
    events = request.events
    built = PieceBuilt(job.unique.index, result.seconds, kernels([result.blobs])[0])
    request.records.pieces.append(built)
    events.emit(
        "compile.end", level=logging.INFO, seconds=built.seconds, kernels=built.kernels, **facts
    )
    events.count(f"{compiler.name}_compiles")
    request.progress(f"compiled piece {job.unique.index}")
    store_artifact(request, job, result)
    if compiler.load is not None and (reason := _obstacle(job, result)):
        events.emit("artifact.not_kept", piece=job.unique.index, reason=reason)


def _obstacle(job: Job, result: CompiledJob) -> str | None:
    """Why the artifact of a job is not stored; None if it is."""
    if job.key is None:
        return job.unique.obstacle or "a setting or a pass has no description"
    if not result.blobs:
        return "the compiler cannot serialize it"
    return None if result.proved else "it holds for a part of the sizes only"


def compiler_options(
    split: SplitModel, job: Job, device: torch.device, events: Events
) -> dict[str, Any]:
    """`plain_options` and passes."""
    passes = inductor_passes(job.passes, partial(events.emit, "pass"), job.unique.index)
    return {**plain_options(split, job, device), **passes}


def plain_options(split: SplitModel, job: Job, device: torch.device) -> dict[str, Any]:
    """Inductor's options for a job: autotuning for one size at level 3, and the user's."""
    tunes = split.config.code.autotune and device.type == "cuda"
    tuned = {"max_autotune": True} if tunes and job.size is not None else {}
    return {**tuned, **split.config.code.inductor_options}


@contextmanager
def _naming(compiler: Compiler, unique: UniquePiece) -> Iterator[None]:
    """Convert errors of the compiler to PieceFailed, which names the piece."""
    try:
        yield
    except PiecegraphError:
        raise
    except Exception as error:
        raise PieceFailed(
            compiler=compiler.name,
            piece=unique.index,
            digest=unique.digest[:12],
            reason=f"{type(error).__name__}: {first_line(error)}",
        ) from error


def _inputs(job: Job, graph: torch.fx.GraphModule) -> list[Any]:
    """Symbolic fake inputs for a range, static ones for one size."""
    if job.size is None:
        return job.unique.piece.example_values()
    return static_inputs(graph, dict.fromkeys(job.unique.piece.symbols(), job.size))
