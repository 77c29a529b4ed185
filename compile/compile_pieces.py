"""Compile unique pieces, each for every span that needs code of its own.

Jobs run one after the other: torch's standalone compile is not thread-safe, and spawned workers
were slower on two cores. Results come in the order of the pieces, and the first error ends it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ..cache import Entry, Key
from ..cache.factors import Json
from ..errors import PieceFailed, PiecegraphError
from ..torch_compat import reasoning_about_sizes
from .agreement import concrete_inputs, disagreement
from .artifact import CODE, Blobs, PieceFn, kernels
from .compilers import Compiler
from .config import TOKENS
from .cut import Cut, UniquePiece
from .factors import codegen_key
from .partitions import partition_options, partitions_of
from .passes.graph_pass import GraphPass, inductor_passes, passes_for
from .plan import CompiledSpan
from .spans import Span, spans
from .task import Task
from .tell import tell_lookup


@dataclass(frozen=True)
class Job:
    """One unique piece for one span. `size` is the token count to compile for, or None."""

    unique: UniquePiece
    span: Span
    passes: tuple[GraphPass, ...]
    size: int | None


@dataclass(frozen=True)
class Compiled:
    """Jobs with their callables and blobs, and which of them serve each span."""

    jobs: list[Job]
    pieces: list[PieceFn]
    artifacts: list[Blobs]
    spans: list[CompiledSpan]


def compile_pieces(task: Task, cut: Cut, compiler: Compiler) -> Compiled:
    """Load or compile every job. Raises PieceFailed and the errors of guards."""
    done = Compiled([], [], [], [])
    numbers: dict[Any, int] = {}
    with task.events.span("compile", level=logging.INFO, pieces=len(cut.unique)):
        for unique in cut.unique:
            cut.guards.check_ends(unique.piece.module(cut.trace.graph), f"piece {unique.index}")
        for span in spans(cut.config):
            used = []
            for job in _jobs(cut, span):
                identity = (job.unique.index, job.size, tuple(each.name for each in job.passes))
                if identity not in numbers:
                    numbers[identity] = len(done.jobs)
                    fn, blobs = _obtain(task, cut, job, compiler)
                    done.jobs.append(job)
                    done.pieces.append(fn)
                    done.artifacts.append(blobs)
                used.append(numbers[identity])
            cuts = sum(partitions_of(done.pieces[number]) for number in used)
            done.spans.append(
                CompiledSpan(low=span.low, high=span.high, artifacts=tuple(used), partitions=cuts)
            )
    return done


def _jobs(cut: Cut, span: Span) -> Iterator[Job]:
    """A job for each unique piece; those without a dynamic size are the same in every span."""
    for unique in cut.unique:
        symbols = [str(cut.guards.label(symbol)) for symbol in unique.piece.symbols()]
        passes = passes_for(cut.config, span.high if symbols else None)
        exact = span.exact and symbols == [TOKENS]
        yield Job(unique, span, passes, span.low if exact else None)


def _obtain(task: Task, cut: Cut, job: Job, compiler: Compiler) -> tuple[PieceFn, Blobs]:
    """The callable of one job: from the cache if it is there, else compiled and stored.

    An artifact is stored, and taken, only for ranges over which all its guards are proved.
    """
    unique = job.unique
    if stored := _stored(task, cut, job, compiler):
        return stored
    with task.events.span("compile.piece", piece=unique.index, digest=unique.digest[:12]) as span:
        fn, blobs = _compile(task, cut, job, compiler)
    graph = unique.piece.module(cut.trace.graph)

    def run(sizes: Mapping[sympy.Symbol, int]) -> str | None:
        return disagreement(fn, graph, sizes)

    # splitting ops inside may need a step around them, or write to memory that is in use
    runnable = None if cut.partition_ops else run
    proved = cut.guards.settle(f"piece {unique.index}", run=runnable)
    if blobs and proved:
        store_artifact(task, cut, job, blobs, span.seconds)
    return fn, blobs


def _stored(task: Task, cut: Cut, job: Job, compiler: Compiler) -> tuple[PieceFn, Blobs] | None:
    if compiler.load is None:
        return None
    key = _key(task, cut, job)
    entry = task.cache.lookup("artifact", key)
    tell_lookup("artifact", key, entry, task.cache, task.events)
    if not isinstance(entry, Entry) or CODE not in entry.contents:
        return None
    if not _covers(entry.meta, _ranges(cut, job)):
        return None
    return compiler.load([entry.contents])[0], entry.contents


def store_artifact(
    task: Task, cut: Cut, job: Job, blobs: Blobs, compile_seconds: float = 0.0
) -> None:
    """Publish what was made of a job, with the ranges over which it is proved."""
    meta: dict[str, Json] = {"compile_seconds": compile_seconds, "ranges": _ranges(cut, job)}
    task.cache.publish("artifact", _key(task, cut, job), meta, blobs)


def _key(task: Task, cut: Cut, job: Job) -> Key:
    return codegen_key(job.unique.digest, cut.config, task.device, job.passes, job.size)


def _ranges(cut: Cut, job: Job) -> list[Json]:
    """The served range of each symbol of the piece, by first appearance."""
    served = cut.guards.limits()
    return [list(served[symbol]) for symbol in job.unique.piece.symbols()]


def _covers(meta: Mapping[str, Any], limits: list[Any]) -> bool:
    """Whether an artifact's proved ranges contain the ones to be served."""
    proved = meta.get("ranges")
    return (
        isinstance(proved, list)
        and len(proved) == len(limits)
        and all(
            isinstance(known, list) and known[0] <= low and high <= known[1]
            for known, (low, high) in zip(proved, limits, strict=True)
        )
    )


def compiler_options(task: Task, cut: Cut, job: Job) -> dict[str, Any]:
    """Inductor's options for a job: autotuned if it is for one size, the user's, the passes."""
    tuned = {} if job.size is None else {"max_autotune": task.device.type == "cuda"}
    passes = inductor_passes(job.passes, task.events, job.unique.index)
    cuts = partition_options(cut.partition_ops) if cut.config.use_inductor_graph_partition else {}
    return {**tuned, **cut.config.inductor_options, **passes, **cuts}


def _compile(task: Task, cut: Cut, job: Job, compiler: Compiler) -> tuple[PieceFn, Blobs]:
    """Run the compiler on a copy of the piece. Raises PieceFailed."""
    unique, events = job.unique, task.events
    about: dict[str, Any] = {
        "piece": unique.index,
        "digest": unique.digest[:12],
        "range": [job.span.low, job.span.high] if job.size is None else [job.size, job.size],
    }
    if compiler.first_use is not None:
        compiler.first_use(task.device, events)
    events.emit("compile.start", compiler=compiler.name, **about)
    began = time.perf_counter()
    try:
        with reasoning_about_sizes(cut.config.dynamic_shapes.value):
            graph = unique.piece.module(cut.trace.graph)
            options = compiler_options(task, cut, job)
            fn, blobs = compiler.compile(graph, _inputs(job, graph), options)
    except PiecegraphError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise PieceFailed(
            compiler=compiler.name, piece=unique.index, digest=unique.digest[:12], reason=reason
        ) from error
    seconds = time.perf_counter() - began
    if cut.config.use_inductor_graph_partition:
        about["partitions"] = partitions_of(fn)
    events.emit("compile.end", seconds=seconds, kernels=kernels([blobs])[0], **about)
    events.count(f"{compiler.name}_compiles")
    return fn, blobs


def _inputs(job: Job, graph: torch.fx.GraphModule) -> list[Any]:
    """Symbolic fake inputs for a range; for one size real tensors, which make it static."""
    if job.size is None:
        return job.unique.piece.example_values()
    return concrete_inputs(graph, dict.fromkeys(job.unique.piece.symbols(), job.size))
