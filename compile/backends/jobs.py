"""Compile the unique pieces of a model: run the jobs of its schedules, each only once.

What is stored is loaded, the rest is compiled by an executor, if there is one, and here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from ...cache import Key
from ..ir.compilation import Compiler, CompileRequest
from ..ir.plan import CompiledRange
from ..plan.split_model import SplitModel
from .in_process import compile_here
from .in_workers import SharedJobs
from .schedule import Job, schedule
from .trace_jobs import CompiledJob, TraceJobs


@dataclass(frozen=True)
class CompiledPieces:
    """The results of all jobs of a model, the trace and the job that each was compiled from first,
    and for each trace which results serve its ranges."""

    results: list[CompiledJob]
    jobs: list[tuple[SplitModel, Job]]
    ranges: list[list[CompiledRange]]


def compile_pieces(
    request: CompileRequest,
    splits: Sequence[SplitModel],
    compiler: Compiler,
    executor: Executor | None = None,
) -> CompiledPieces:
    """Load or compile the pieces of each trace of a model; equal pieces of several traces once.

    Raises PieceFailed and the errors of guards.
    """
    compiled = CompiledPieces([], [], [])
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
            trace = TraceJobs(request, split, compiler)
            done = _compile_trace(trace, new, plan.machine, executor)
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
    trace: TraceJobs, jobs: Mapping[int, Job], machine: Key | None, executor: Executor | None
) -> dict[int, CompiledJob]:
    """Load or compile jobs of a trace, by number."""
    stored = {number: trace.stored(job) for number, job in jobs.items()}
    results = {number: result for number, result in stored.items() if result is not None}
    missing = {number: job for number, job in jobs.items() if number not in results}
    trace.request.events.emit("compile.jobs", jobs=len(missing), stored=len(results))
    if executor is not None and machine is not None:
        return results | SharedJobs(trace, missing, machine, executor).compile()
    return results | compile_here(trace, iter(missing.items()))
