"""Add an AOTInductor library for each artifact of a bundle, the form that loads fastest.

A cold start serves from Inductor's standalone artifacts, which are ready sooner. This runs after
it, or while an image is built. The next start then loads in milliseconds and imports neither Dynamo
nor Inductor. The model is traced again; its artifacts come from the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import LibraryUnusable
from ..torch_compat.compiling.piece_data import NotData
from ..torch_compat.tracing.dynamo import reasoning_about_sizes
from ..torch_compat.tracing.sources import drop_sources, next_source
from .backends.aoti import build_library
from .backends.in_workers import POLL_SECONDS, Submitted, as_task, machine_of
from .backends.inductor import compiling
from .backends.jobs import CompiledPieces, compile_pieces
from .backends.registry import compiler_named
from .backends.schedule import Job
from .backends.trace_jobs import compiler_options, store_artifact
from .backends.worker import CompiledPiece, Failed, Reply
from .backends.workers import workers_for
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

    Also False if the trace must not be cached, if code is partitioned, which a library cannot be,
    and if the bundle cannot be stored. An event then gives the reason, and it is unchanged.
    """
    if reason := request.cache.keeps_nothing:
        request.records.failed_writes.append(reason)
        _emit_failure(request, f"nothing can be stored in the cache: {reason}")
        return False
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
        with workers_for(request) as executor:
            splits = split_model(trace_with_guards(request), request.events)
            compiler = compiler_named(request.config.code.compiler)
            compiled = compile_pieces(request, splits, compiler, executor)
            artifacts = _with_libraries(request, compiled, executor)
    finally:
        drop_sources(range(first, next_source()))
    if artifacts is None:
        return False
    request.check_state()
    plan = plan_of(splits, compiled.ranges)
    seconds = sum(result.seconds for result in compiled.results)
    stored = store_bundle(request, key, conditions_of(splits), plan, artifacts, seconds)
    return stored is not None


def _with_libraries(
    request: CompileRequest, compiled: CompiledPieces, executor: Executor | None
) -> list[Blobs] | None:
    """The artifacts with a library each, all stored; None if one of them cannot have one.

    The executor builds what can be sent to it, and this process the rest.
    """
    artifacts = [result.blobs for result in compiled.results]
    here = [number for number, blobs in enumerate(artifacts) if LIBRARY not in blobs]
    submitted = Submitted(executor, _tasks(request, compiled, here)) if executor else None
    try:
        for number, reply in _replies(request, submitted, here):
            (split, job), result = compiled.jobs[number], compiled.results[number]
            with _reporting_failures(request, job):
                match reply:
                    case Failed():
                        raise LibraryUnusable(reason=reply.reason)
                    case CompiledPiece():
                        library = reply.blobs[LIBRARY]
                    case _:  # only this process can build it
                        library = _library(request, split, job)
                artifacts[number] = {**result.blobs, LIBRARY: library}
                request.events.count("library_compiles")
                if result.proved:
                    store_artifact(request, job, artifacts[number], result.seconds)
    finally:
        if submitted:
            submitted.cancel()
    return artifacts if all(LIBRARY in blobs for blobs in artifacts) else None


def _replies(
    request: CompileRequest, submitted: Submitted | None, numbers: list[int]
) -> Iterator[tuple[int, Reply | None]]:
    """Of each number the reply of the executor, None for what was not submitted."""
    for number in numbers:
        if submitted is None or number not in submitted:
            request.checkpoint()
            yield number, None
    while submitted:
        request.checkpoint()
        yield from submitted.replies(POLL_SECONDS)


def _tasks(
    request: CompileRequest, compiled: CompiledPieces, numbers: list[int]
) -> dict[int, bytes]:
    """Jobs whose libraries another process can build, by number."""
    tasks, device = dict[int, bytes](), request.device
    for number in numbers:
        split, job = compiled.jobs[number]
        code = split.config.code
        with suppress(NotData):
            machine = machine_of(split, code.compiler, device, machine_key(code, device))
            tasks[number] = as_task(split, job, machine, _limits(split, job))
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
    _emit_failure(request, reason, **facts)


def _emit_failure(request: CompileRequest, reason: str, **facts: Any) -> None:
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
