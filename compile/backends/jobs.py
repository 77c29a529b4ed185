"""Compile unique pieces, each for every range that needs its own code.

Code is generated for one piece after the other: torch's standalone compile is not thread-safe, and
worker processes were slower on two cores. The kernels of one piece are compiled while code for the
next is generated. Results come in the order of the pieces. The first error stops the compilation;
pieces that were finished before it are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import sympy
import torch

from ...cache import Entry, Key
from ...cache.keys.encoder import Undescribable
from ...cache.keys.factors import Json
from ...errors import PieceFailed, PiecegraphError
from ...torch_compat.tracing.dynamo import reasoning_about_sizes
from ..bundle.key_factors import codegen_key, machine_key
from ..guards.numerics_check import concrete_inputs, numeric_difference
from ..ir.compilation import CODE, Blobs, Compiler, CompileRequest, PieceBuilt, PieceFn, kernels
from ..ir.config import TOKENS, GraphPass
from ..ir.locations import first_line, node_location
from ..ir.plan import CompiledRange
from ..passes.graph_pass import inductor_passes, passes_up_to
from ..pieces.compile_ranges import CompileRange, compile_ranges
from ..plan.split_model import SplitModel, UniquePiece
from .partition import partition_options, partitions_of


@dataclass(frozen=True)
class Job:
    """One unique piece to compile for one range. `size` is set for a static compile size."""

    unique: UniquePiece
    interval: CompileRange
    passes: tuple[GraphPass, ...]
    size: int | None
    key: Key | None
    """None for what has no description: it is not stored."""


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


def compile_pieces(request: CompileRequest, split: SplitModel, compiler: Compiler) -> Compiled:
    """Load or compile every job. Raises PieceFailed and the errors of guards."""
    with request.events.span("compile", level=logging.INFO, pieces=len(split.unique)):
        for unique in split.unique:
            split.guards.check_ends(unique.piece.module(split.trace.graph), f"piece {unique.index}")
        jobs, used = _schedule(split, request.device)
        made = {number: _stored(request, split, job, compiler) for number, job in enumerate(jobs)}
        missing = [number for number, stored in made.items() if stored is None]
        if missing and compiler.first_use is not None:
            compiler.first_use(request.device, request.events)
        with compiler.session() if missing else nullcontext():
            begins = (partial(_begin, request, split, n, jobs[n], compiler) for n in missing)
            made.update(zip(missing, _overlapped(begins), strict=True))
    done = [each for each in made.values() if each is not None]
    return Compiled(jobs, done, [_served(interval, numbers, done) for interval, numbers in used])


def _schedule(
    split: SplitModel, device: torch.device
) -> tuple[list[Job], list[tuple[CompileRange, tuple[int, ...]]]]:
    """The distinct jobs, and for each range the numbers of the jobs that serve it."""
    try:
        machine = machine_key(split.config.code, device)
    except Undescribable:
        machine = None
    jobs: dict[Any, tuple[int, Job]] = {}
    used = []
    for interval in compile_ranges(split.config):
        numbers = []
        for job in _jobs(split, interval, machine):
            identity = (job.unique.index, job.size, tuple(each.name for each in job.passes))
            numbers.append(jobs.setdefault(identity, (len(jobs), job))[0])
        used.append((interval, tuple(numbers)))
    return [job for _, job in jobs.values()], used


def _served(
    interval: CompileRange, numbers: tuple[int, ...], made: Sequence[CompiledJob]
) -> CompiledRange:
    cuts = sum(partitions_of(made[number].fn) for number in numbers)
    return CompiledRange(low=interval.low, high=interval.high, artifacts=numbers, partitions=cuts)


def _overlapped(begins: Iterable[Callable[[], Callable[[], CompiledJob]]]) -> Iterator[CompiledJob]:
    """Start each, and finish it after the next has started."""
    waiting: Callable[[], CompiledJob] | None = None
    for begin in begins:
        try:
            begun = begin()
        except Exception:
            if waiting:
                waiting()
            raise
        if waiting:
            yield waiting()
        waiting = begun
    if waiting:
        yield waiting()


def _jobs(split: SplitModel, interval: CompileRange, machine: Key | None) -> Iterator[Job]:
    """A job for each unique piece; without dynamic sizes a piece has one job for all ranges."""
    for unique in split.unique:
        symbols = [str(split.guards.label(symbol)) for symbol in unique.piece.symbols()]
        passes = passes_up_to(split.config.passes, interval.high if symbols else None)
        size = interval.low if interval.exact and symbols == [TOKENS] else None
        yield Job(unique, interval, passes, size, _key(machine, unique, passes, size))


def _key(
    machine: Key | None, unique: UniquePiece, passes: Sequence[GraphPass], size: int | None
) -> Key | None:
    if machine is None or unique.obstacle is not None:
        return None
    try:
        return codegen_key(machine, unique.digest, passes, size)
    except Undescribable:
        return None


def _stored(
    request: CompileRequest, split: SplitModel, job: Job, compiler: Compiler
) -> CompiledJob | None:
    if compiler.load is None or job.key is None:
        return None
    entry = request.cache.lookup("artifact", job.key)
    request.record_lookup("artifact", job.key, entry)
    if not isinstance(entry, Entry) or CODE not in entry.contents:
        return None
    if not _covers(entry.meta, _ranges(split, job)):
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
    known = float(seconds) if isinstance(seconds, (int, float)) else 0.0
    return CompiledJob(fn, entry.contents, proved=True, seconds=known)


def store_artifact(request: CompileRequest, split: SplitModel, job: Job, made: CompiledJob) -> None:
    """Store the artifact of a job with the ranges over which its guards are proved."""
    if job.key is not None and made.blobs and made.proved:
        meta: dict[str, Json] = {"compile_seconds": made.seconds, "ranges": _ranges(split, job)}
        request.cache.publish("artifact", job.key, meta, made.blobs)


def _ranges(split: SplitModel, job: Job) -> list[Json]:
    """The served range of each symbol of the piece, by first appearance."""
    served = split.guards.limits()
    return [list(served[symbol]) for symbol in job.unique.piece.symbols()]


def _covers(meta: Mapping[str, Any], limits: list[Any]) -> bool:
    """Whether the ranges proved for an artifact contain the served ranges."""
    proved = meta.get("ranges")
    return (
        isinstance(proved, list)
        and len(proved) == len(limits)
        and all(
            isinstance(known, list) and known[0] <= low and high <= known[1]
            for known, (low, high) in zip(proved, limits, strict=True)
        )
    )


def compiler_options(request: CompileRequest, split: SplitModel, job: Job) -> dict[str, Any]:
    """Inductor's options for a job: autotuning for one size at level 3, the user's, passes."""
    tunes = split.config.code.autotune and request.device.type == "cuda"
    tuned = {"max_autotune": True} if tunes and job.size is not None else {}
    passes = inductor_passes(job.passes, request.events, job.unique.index)
    cuts = partition_options(split.partition_ops) if split.config.code.inductor_partition else {}
    return {**tuned, **split.config.code.inductor_options, **passes, **cuts}


def _begin(
    request: CompileRequest, split: SplitModel, number: int, job: Job, compiler: Compiler
) -> Callable[[], CompiledJob]:
    """Run the compiler on a copy of the piece, and prove the guards that it adds.

    Raises PieceFailed and the errors of guards.
    """
    unique, events = job.unique, request.events
    about: dict[str, Any] = {
        "piece": unique.index,
        "digest": unique.digest[:12],
        "range": [job.size or job.interval.low, job.size or job.interval.high],
    }
    graph = unique.piece.module(split.trace.graph)
    low, high = about["range"]
    title = f"piece {unique.index}, tokens {low} to {high}"
    where = next(filter(None, map(node_location, graph.graph.nodes)), None)
    unit = partial(events.trace_unit, number + 1, title, where)
    with (
        unit(),
        events.span("compile.piece", piece=unique.index, digest=unique.digest[:12]) as generation,
        _naming(compiler, unique),
        reasoning_about_sizes(split.config.code.dynamic_shapes.value),
    ):
        events.emit("compile.start", compiler=compiler.name, **about)
        options = compiler_options(request, split, job)
        wait = cache(compiler.compile(graph, _inputs(job, graph), options))

    def run(sizes: Mapping[sympy.Symbol, int]) -> str | None:
        return numeric_difference(wait()[0], unique.piece.module(split.trace.graph), sizes)

    # splitting ops inside may need a running step, or write to memory in use
    runnable = None if split.partition_ops else run
    proved = split.guards.prove_new(f"piece {unique.index}", run=runnable)

    def finish() -> CompiledJob:
        with (
            unit(),
            events.span("compile.kernels", piece=unique.index) as waiting,
            _naming(compiler, unique),
        ):
            fn, blobs = wait()
        made = CompiledJob(fn, blobs, proved, generation.seconds + waiting.seconds)
        if split.config.code.inductor_partition:
            about["partitions"] = partitions_of(fn)
        built = PieceBuilt(unique.index, made.seconds, kernels([blobs])[0])
        request.records.pieces.append(built)
        with unit():
            events.emit("compile.end", seconds=built.seconds, kernels=built.kernels, **about)
        events.count(f"{compiler.name}_compiles")
        store_artifact(request, split, job, made)
        return made

    return finish


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
