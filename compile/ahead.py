"""Add an AOTInductor library for each artifact of a bundle, the form that loads fastest.

A cold start serves from Inductor's standalone artifacts, which are ready sooner. This runs after
it, or while an image is built. The next start then loads in milliseconds and imports neither Dynamo
nor Inductor. The model is traced again; its artifacts come from the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import LibraryUnusable
from ..torch_compat.compiling.piece_data import NotData
from ..torch_compat.tracing.dynamo import reasoning_about_sizes
from ..torch_compat.tracing.sources import drop_sources, next_source
from .backends.aoti import build_library
from .backends.in_workers import POLL_SECONDS, as_task
from .backends.inductor import compiling
from .backends.jobs import Compiled, compile_pieces
from .backends.registry import compiler_named
from .backends.schedule import Job
from .backends.trace_jobs import compiler_options, store_artifact
from .backends.worker import Compiled as CompiledInWorker
from .backends.worker import Failed, Machine, Reply, Task
from .backends.workers import Workers, workers_for
from .bundle.bundle import store_bundle
from .bundle.key_factors import machine_key, trace_key
from .conditions.values import Undescribable
from .guards.prover import Ranges
from .guards.trace_with_guards import trace_with_guards
from .ir.compilation import LIBRARY, Blobs, CompileRequest
from .ir.config import Partition
from .ir.locations import first_line
from .plan.split_model import SplitModel, conditions_of, plan_of, split_model


def compile_ahead(request: CompileRequest) -> bool:
    """Build the missing libraries and republish the bundle; False if an artifact cannot have one.

    Also False if the trace must not be cached, or if code is partitioned, which a library cannot
    be; an event then gives the reason, and the bundle is unchanged.
    """
    if request.config.partition is Partition.INDUCTOR:
        _record_failure(request, "a library cannot be partitioned at the splitting ops")
        return False
    try:
        key = trace_key(request.model, request.config, request.device, request.examples)
    except Undescribable as error:
        request.record_not_cacheable([str(error)])
        return False
    first = next_source()
    try:
        with workers_for(request) as workers:
            splits = split_model(trace_with_guards(request), request.events)
            compiler = compiler_named(request.config.code.compiler)
            compiled = compile_pieces(request, splits, compiler, workers)
            artifacts = _with_libraries(request, compiled, workers)
    finally:
        drop_sources(range(first, next_source()))
    if artifacts is None:
        return False
    request.check_state()
    plan = plan_of(splits, compiled.ranges)
    seconds = sum(result.seconds for result in compiled.results)
    return store_bundle(request, key, conditions_of(splits), plan, artifacts, seconds)


def _with_libraries(
    request: CompileRequest, compiled: Compiled, workers: Workers | None
) -> list[Blobs] | None:
    """The artifacts with a library each, all stored; None if one of them cannot have one.

    Workers build what can be sent to them, and this process the rest.
    """
    artifacts = [result.blobs for result in compiled.results]
    here = [number for number, blobs in enumerate(artifacts) if LIBRARY not in blobs]
    tasks = _tasks(request, compiled, here) if workers is not None else {}
    here = [number for number in here if number not in tasks]
    if workers is not None:
        workers.give([*tasks.values()])
    while here or tasks:
        request.checkpoint()
        reply: Reply | None = None
        if here:
            number = here.pop()
        elif workers is not None and isinstance(message := workers.reply(POLL_SECONDS), tuple):
            number, reply = tasks.pop(message[0].number).number, message[1]
        else:
            continue
        (split, job), result = compiled.jobs[number], compiled.results[number]
        with _reporting_failures(request, job):
            match reply:
                case Failed():
                    raise LibraryUnusable(reason=reply.reason)
                case CompiledInWorker():
                    library = reply.blobs[LIBRARY]
                case _:  # no worker can build it
                    library = _library(request, split, job)
            artifacts[number] = {**result.blobs, LIBRARY: library}
            request.events.count("library_compiles")
            if result.proved:
                store_artifact(request, job, artifacts[number], result.seconds)
    return artifacts if all(LIBRARY in blobs for blobs in artifacts) else None


def _tasks(request: CompileRequest, compiled: Compiled, numbers: list[int]) -> dict[int, Task]:
    """Jobs whose libraries workers can build, by number."""
    tasks = {}
    for number in numbers:
        split, job = compiled.jobs[number]
        code = split.config.code
        machine = Machine(code, request.device, machine_key(code, request.device))
        with suppress(NotData):
            tasks[number] = as_task(number, split, job, machine, _limits(split, job))
    return tasks


@contextmanager
def _reporting_failures(request: CompileRequest, job: Job) -> Iterator[None]:
    """Record an error, for torch may refuse for many reasons: the standalone form serves then."""
    try:
        with request.events.span("compile.library", **job.names()):
            yield
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        _record_failure(request, reason, piece=job.unique.index)


def _record_failure(request: CompileRequest, reason: str, **facts: Any) -> None:
    request.records.failed_libraries.append(reason)
    request.events.emit("compile.library_failed", level=logging.WARNING, **facts, reason=reason)


def _library(request: CompileRequest, split: SplitModel, job: Job) -> bytes:
    graph = job.unique.piece.module(split.trace.graph)
    options = compiler_options(split, job, request.device, request.events)
    with compiling(), reasoning_about_sizes(split.config.code.dynamic_shapes.value):
        return build_library(graph, _limits(split, job), request.device, options)


def _limits(split: SplitModel, job: Job) -> Ranges:
    limits = split.guards_of(job.unique).limits()
    if job.size is not None:
        limits |= dict.fromkeys(job.unique.piece.symbols(), (job.size, job.size))
    return limits
