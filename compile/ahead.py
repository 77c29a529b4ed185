"""Add an AOTInductor library for each artifact of a bundle, the form that loads fastest.

A cold start serves from Inductor's standalone artifacts, which are ready sooner. This runs after
it, or while an image is built. The next start then loads in milliseconds and imports neither Dynamo
nor Inductor. The model is traced again; its artifacts come from the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..cache.keys.encoder import Undescribable
from ..events import Events
from ..torch_compat.tracing.dynamo import reasoning_about_sizes
from .backends.aoti import build_library
from .backends.inductor import compiling
from .backends.jobs import Compiled, compile_pieces, compiler_options, store_artifact
from .backends.registry import compiler_named
from .backends.schedule import Job
from .bundle.bundle import store_bundle
from .bundle.key_factors import trace_key
from .guards.trace_with_guards import trace_with_guards
from .ir.compilation import LIBRARY, Blobs, CompileRequest
from .ir.locations import first_line
from .plan.split_model import SplitModel, conditions_of, plan_of, split_model


def compile_ahead(request: CompileRequest) -> bool:
    """Build the missing libraries and republish the bundle; False if an artifact cannot have one.

    Also False if the trace must not be cached; an event then gives the reason, and the bundle is
    unchanged.
    """
    try:
        key = trace_key(request.model, request.config, request.device, request.examples)
    except Undescribable as error:
        request.record_not_cacheable([str(error)])
        return False
    splits = split_model(trace_with_guards(request), request.events)
    compiled = compile_pieces(request, splits, compiler_named(request.config.code.compiler))
    artifacts = _with_libraries(request, compiled)
    if artifacts is None:
        return False
    plan = plan_of(splits, compiled.ranges)
    seconds = sum(result.seconds for result in compiled.results)
    return store_bundle(request, key, conditions_of(splits), plan, artifacts, seconds)


def _with_libraries(request: CompileRequest, compiled: Compiled) -> list[Blobs] | None:
    """The artifacts with a library each, all stored; None if one of them cannot have one."""
    artifacts = [result.blobs for result in compiled.results]
    with compiling():
        for number, result in enumerate(compiled.results):
            split, job = compiled.jobs[number]
            if LIBRARY not in result.blobs:
                with _reporting_failures(request.events, job):
                    artifacts[number] = {**result.blobs, LIBRARY: _library(request, split, job)}
                    request.events.count("library_compiles")
                    store_artifact(request.cache, job, replace(result, blobs=artifacts[number]))
    return artifacts if all(LIBRARY in blobs for blobs in artifacts) else None


@contextmanager
def _reporting_failures(events: Events, job: Job) -> Iterator[None]:
    """Report an error, for torch may refuse for many reasons: the standalone form serves then."""
    index = job.unique.index
    try:
        with events.span("compile.library", piece=index, digest=job.unique.digest[:12]):
            yield
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        events.emit("compile.library_failed", level=logging.WARNING, piece=index, reason=reason)


def _library(request: CompileRequest, split: SplitModel, job: Job) -> bytes:
    graph = job.unique.piece.module(split.trace.graph)
    limits = split.guards_of(job.unique).limits()
    if job.size is not None:
        limits |= dict.fromkeys(job.unique.piece.symbols(), (job.size, job.size))
    options = compiler_options(split, job, request.device, request.events)
    with reasoning_about_sizes(split.config.code.dynamic_shapes.value):
        return build_library(graph, limits, request.device, options)
