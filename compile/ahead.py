"""Give a bundle its fast form: an AOTInductor library for each artifact.

A cold start serves from Inductor's standalone artifacts, which are ready sooner. This is run after
it, or by whoever builds an image; the next start then loads in milliseconds and imports neither
Dynamo nor Inductor. The model is traced again; its artifacts come from the cache.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ..errors import InvalidSetting
from ..torch_compat.dynamo import reasoning_about_sizes
from .backends.aoti import build_library
from .backends.jobs import Job, compile_pieces, compiler_options, store_artifact
from .backends.registry import compiler_named
from .bundle.bundle import Bundle, store_bundle
from .bundle.key_factors import trace_key
from .bundle.provenance import provenance
from .ir.artifact import LIBRARY, Blobs
from .ir.request import Task
from .lower.cut import Cut, cut_model


def compile_ahead(task: Task) -> bool:
    """Build the missing libraries and republish the bundle; False if an artifact cannot have one.

    It is then reported, and the bundle keeps its form. Raises InvalidSetting where Inductor is to
    cut the code: a library is one unit.
    """
    if task.config.use_inductor_graph_partition:
        raise InvalidSetting(
            name="use_inductor_graph_partition",
            value=True,
            reason="an ahead-of-time library cannot be partitioned",
            expected="False for what is compiled ahead, or serve from Inductor's artifacts",
        )
    key = trace_key(task.model, task.config, task.device, task.examples)
    cut = cut_model(task)
    compiled = compile_pieces(task, cut, compiler_named(task.config.compiler))
    artifacts: list[Blobs] = []
    for job, made in zip(compiled.jobs, compiled.made, strict=True):
        if LIBRARY not in made.blobs:
            library = _library(task, cut, job)
            if library is None:
                return False
            made = replace(made, blobs={**made.blobs, LIBRARY: library})
            store_artifact(task, cut, job, made)
        artifacts.append(made.blobs)
    plan = cut.plan(compiled.spans)
    bundle = Bundle(plan, provenance(cut.trace, cut.config), artifacts)
    store_bundle(task.cache, key, bundle, task.model, task.device)
    return True


def _library(task: Task, cut: Cut, job: Job) -> bytes | None:
    graph = job.unique.piece.module(cut.trace.graph)
    limits = cut.guards.limits()
    if job.size is not None:
        limits |= dict.fromkeys(job.unique.piece.symbols(), (job.size, job.size))
    index = job.unique.index
    try:
        with (
            task.events.span("compile.library", piece=index, digest=job.unique.digest[:12]),
            reasoning_about_sizes(cut.config.dynamic_shapes.value),
        ):
            library = build_library(graph, limits, task.device, compiler_options(task, cut, job))
    except Exception as error:  # whatever torch refuses: the other form serves
        reason = f"{type(error).__name__}: {error}"
        task.events.emit(
            "compile.library_failed", level=logging.WARNING, piece=index, reason=reason
        )
        return None
    task.events.count("library_compiles")
    return library
