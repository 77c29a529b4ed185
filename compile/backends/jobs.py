"""Compile unique pieces: run the jobs of a schedule.

Code is generated for one piece after the other: torch's standalone compile is not thread-safe, and
worker processes were slower on two cores. The kernels of one piece are compiled while code for the
next is generated. Results come in the order of the pieces. The first error stops the compilation;
pieces that were finished before it are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import sympy
import torch

from ...cache import Cache, Entry
from ...cache.keys.factors import Json
from ...errors import PieceFailed, PiecegraphError
from ...events import Events
from ...torch_compat.tracing.dynamo import reasoning_about_sizes
from ..guards.numerics_check import concrete_inputs, numeric_difference
from ..ir.compilation import CODE, Blobs, Compiler, CompileRequest, PieceBuilt, PieceFn, kernels
from ..ir.locations import first_line, node_location
from ..ir.plan import CompiledRange
from ..passes.graph_pass import inductor_passes
from ..plan.split_model import SplitModel, UniquePiece
from .partition import partition_options, partitions_of
from .schedule import Job, schedule


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
    """Jobs, the result of each, and which results serve each range."""

    jobs: list[Job]
    results: list[CompiledJob]
    ranges: list[CompiledRange]


@dataclass(frozen=True)
class _StartedJob:
    """A job whose code is generated; `wait` gives its callable and the artifact to store."""

    job: Job
    wait: Callable[[], tuple[PieceFn, Blobs]]
    proved: bool
    seconds: float
    unit: Callable[[], AbstractContextManager[None]]
    """The compile id of the job in a structured trace."""
    facts: dict[str, Any]


def compile_pieces(request: CompileRequest, split: SplitModel, compiler: Compiler) -> Compiled:
    """Load or compile every job. Raises PieceFailed and the errors of guards."""
    with request.events.span("compile", level=logging.INFO, pieces=len(split.unique)):
        for unique in split.unique:
            split.guards.check_ends(unique.piece.module(split.trace.graph), f"piece {unique.index}")
        plan = schedule(split, request.device)
        results = {number: _load(request, job, compiler) for number, job in enumerate(plan.jobs)}
        missing = [number for number, result in results.items() if result is None]
        if missing and compiler.first_use is not None:
            compiler.first_use(request.device, request.events)
        with compiler.session() if missing else nullcontext():
            compiled = _compile(request, split, compiler, [(n, plan.jobs[n]) for n in missing])
            results.update(zip(missing, compiled, strict=True))
    done = [result for result in results.values() if result is not None]
    ranges = [
        CompiledRange(
            low=interval.low,
            high=interval.high,
            artifacts=numbers,
            partitions=sum(partitions_of(done[number].fn) for number in numbers),
        )
        for interval, numbers in plan.ranges
    ]
    return Compiled(plan.jobs, done, ranges)


def _load(request: CompileRequest, job: Job, compiler: Compiler) -> CompiledJob | None:
    """The stored artifact of a job, if there is one that was proved for the served ranges."""
    if compiler.load is None or job.key is None:
        return None
    entry = request.cache.lookup("artifact", job.key)
    request.record_lookup("artifact", job.key, entry)
    if not isinstance(entry, Entry) or CODE not in entry.contents:
        return None
    if not _covers(entry.meta.get("ranges"), job.served):
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


def store_artifact(cache: Cache, job: Job, result: CompiledJob) -> None:
    """Store the artifact of a job with the ranges over which its guards are proved."""
    if job.key is not None and result.blobs and result.proved:
        meta: dict[str, Json] = {"compile_seconds": result.seconds, "ranges": job.served}
        cache.publish("artifact", job.key, meta, result.blobs)


def _compile(
    request: CompileRequest, split: SplitModel, compiler: Compiler, jobs: list[tuple[int, Job]]
) -> Iterator[CompiledJob]:
    """Start each job, and finish it after the next has started."""
    waiting: _StartedJob | None = None
    for number, job in jobs:
        try:
            started = _start(request, split, compiler, number, job)
        except Exception:
            if waiting is not None:
                _finish(request, compiler, waiting)
            raise
        if waiting is not None:
            yield _finish(request, compiler, waiting)
        waiting = started
    if waiting is not None:
        yield _finish(request, compiler, waiting)


def _start(
    request: CompileRequest, split: SplitModel, compiler: Compiler, number: int, job: Job
) -> _StartedJob:
    """Run the compiler on a copy of the piece, and prove the guards that it adds.

    Raises PieceFailed and the errors of guards.
    """
    unique, events, (low, high) = job.unique, request.events, job.span
    facts: dict[str, Any] = {
        "piece": unique.index,
        "digest": unique.digest[:12],
        "range": [low, high],
    }
    graph = unique.piece.module(split.trace.graph)
    title = f"piece {unique.index}, tokens {low} to {high}"
    where = next(filter(None, map(node_location, graph.graph.nodes)), None)
    unit = partial(events.trace_unit, number + 1, title, where)
    with (
        unit(),
        events.span("compile.piece", piece=unique.index, digest=unique.digest[:12]) as generation,
        _naming(compiler, unique),
        reasoning_about_sizes(split.config.code.dynamic_shapes.value),
    ):
        events.emit("compile.start", compiler=compiler.name, **facts)
        options = compiler_options(split, job, request.device, events)
        wait = cache(compiler.compile(graph, _inputs(job, graph), options))
    return _StartedJob(job, wait, _prove(split, unique, wait), generation.seconds, unit, facts)


def _prove(
    split: SplitModel, unique: UniquePiece, wait: Callable[[], tuple[PieceFn, Blobs]]
) -> bool:
    """Prove the guards that the compiler added, where it helps by running the compiled code."""

    def run(sizes: Mapping[sympy.Symbol, int]) -> str | None:
        return numeric_difference(wait()[0], unique.piece.module(split.trace.graph), sizes)

    # splitting ops inside may need a running step, or write to memory in use
    runnable = None if split.partition_ops else run
    return split.guards.prove_new(f"piece {unique.index}", run=runnable)


def _finish(request: CompileRequest, compiler: Compiler, started: _StartedJob) -> CompiledJob:
    """Wait for the kernels of a job, record and store it. Raises PieceFailed."""
    job, events = started.job, request.events
    with (
        started.unit(),
        events.span("compile.kernels", piece=job.unique.index) as waiting,
        _naming(compiler, job.unique),
    ):
        fn, blobs = started.wait()
    result = CompiledJob(fn, blobs, started.proved, started.seconds + waiting.seconds)
    built = PieceBuilt(job.unique.index, result.seconds, kernels([blobs])[0])
    request.records.pieces.append(built)
    cuts = {"partitions": count} if (count := partitions_of(fn)) else {}
    with started.unit():
        facts = {"seconds": built.seconds, "kernels": built.kernels, **started.facts, **cuts}
        events.emit("compile.end", **facts)
    events.count(f"{compiler.name}_compiles")
    store_artifact(request.cache, job, result)
    if compiler.load is not None and (reason := _obstacle(job, result)):
        events.emit("artifact.not_kept", piece=job.unique.index, reason=reason)
    return result


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
    """Inductor's options for a job: autotuning for one size at level 3, the user's, passes."""
    tunes = split.config.code.autotune and device.type == "cuda"
    tuned = {"max_autotune": True} if tunes and job.size is not None else {}
    passes = inductor_passes(job.passes, events, job.unique.index)
    cuts = partition_options(split.partition_ops) if split.config.code.inductor_partition else {}
    return {**tuned, **split.config.code.inductor_options, **passes, **cuts}


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
    """Symbolic fake inputs for a range; real tensors for one size, which makes it static."""
    if job.size is None:
        return job.unique.piece.example_values()
    return concrete_inputs(graph, dict.fromkeys(job.unique.piece.symbols(), job.size))
