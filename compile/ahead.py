"""Add an AOTInductor library for each artifact of a bundle, the form that loads fastest.

A cold start serves from Inductor's standalone artifacts, which are ready sooner. This runs after
it, or while an image is built. The next start then loads in milliseconds and imports neither Dynamo
nor Inductor. The model is traced again; its artifacts come from the cache.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ..errors import InvalidSetting
from ..torch_compat.dynamo import reasoning_about_sizes
from .backends.aoti import build_library
from .backends.jobs import Job, compile_pieces, compiler_options, store_artifact
from .backends.registry import compiler_named
from .bundle.bundle import store_bundle
from .bundle.key_factors import trace_key
from .guards.trace_with_guards import trace_with_guards
from .ir.compilation import LIBRARY, Blobs, CompileRequest
from .ir.locations import first_line
from .lower.split_model import SplitModel, split_model


def compile_ahead(request: CompileRequest) -> bool:
    """Build the missing libraries and republish the bundle; False if an artifact cannot have one.

    Also False if the trace must not be cached; an event then gives the reason, and the bundle is
    unchanged. Raises InvalidSetting with `use_inductor_graph_partition`: a library cannot be
    partitioned.
    """
    if request.config.use_inductor_graph_partition:
        raise InvalidSetting(
            name="use_inductor_graph_partition",
            value=True,
            reason="an ahead-of-time library cannot be partitioned",
            expected="False for what is compiled ahead, or serve from Inductor's artifacts",
        )
    key = trace_key(request.model, request.config, request.device, request.examples)
    split = split_model(trace_with_guards(request), request.events)
    compiled = compile_pieces(request, split, compiler_named(request.config.compiler))
    artifacts: list[Blobs] = []
    for job, made in zip(compiled.jobs, compiled.results, strict=True):
        if LIBRARY not in made.blobs:
            library = _library(request, split, job)
            if library is None:
                return False
            made = replace(made, blobs={**made.blobs, LIBRARY: library})
            store_artifact(request, split, job, made)
        artifacts.append(made.blobs)
    plan = split.plan(compiled.ranges)
    return store_bundle(request, key, split.trace, split.config, plan, artifacts)


def _library(request: CompileRequest, split: SplitModel, job: Job) -> bytes | None:
    graph = job.unique.piece.module(split.trace.graph)
    limits = split.guards.limits()
    if job.size is not None:
        limits |= dict.fromkeys(job.unique.piece.symbols(), (job.size, job.size))
    index = job.unique.index
    try:
        with (
            request.events.span("compile.library", piece=index, digest=job.unique.digest[:12]),
            reasoning_about_sizes(split.config.dynamic_shapes.value),
        ):
            library = build_library(
                graph, limits, request.device, compiler_options(request, split, job)
            )
    except Exception as error:  # torch may refuse for many reasons: the standalone form serves
        reason = f"{type(error).__name__}: {first_line(error)}"
        request.events.emit(
            "compile.library_failed", level=logging.WARNING, piece=index, reason=reason
        )
        return None
    request.events.count("library_compiles")
    return library
