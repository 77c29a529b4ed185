"""Give a bundle its fast form: an AOTInductor library for each unique piece.

A cold start serves from Inductor's standalone artifacts, which are ready sooner. This is run after
it, or by whoever builds an image; the next start then loads in milliseconds and imports neither
Dynamo nor Inductor. The model is traced again; its artifacts come from the cache.
"""

from __future__ import annotations

import logging
import time

from ..cache import Entry
from ..torch_compat import reasoning_about_sizes
from .aoti import Limits, build_library
from .artifact import LIBRARY, Blobs
from .bundle import Bundle, store_bundle
from .compile_model import Cut, Task, cut_model
from .factors import codegen_key, trace_key
from .pieces import Piece


def compile_ahead(task: Task) -> bool:
    """Build the missing libraries and republish the bundle; False if a piece cannot have one.

    Such a piece is reported, and the bundle keeps its form.
    """
    cut = cut_model(task)
    limits = {str(symbol): task.config.limits(label) for symbol, label in cut.labels.items()}
    artifacts: list[Blobs] = []
    for index, (digest, piece) in enumerate(cut.unique):
        key = codegen_key(digest, task.config, task.device)
        entry = task.cache.lookup("artifact", key)
        stored = entry.contents if isinstance(entry, Entry) else {}
        if LIBRARY not in stored:
            began = time.perf_counter()
            with task.events.span("compile.library", piece=index, digest=digest[:12]):
                library = _library(task, cut, index, piece, limits)
            if library is None:
                return False
            stored = {**stored, LIBRARY: library}
            seconds = time.perf_counter() - began
            task.cache.publish("artifact", key, {"compile_seconds": seconds}, stored)
        artifacts.append(stored)
    key = trace_key(task.model, task.config, task.device)
    store_bundle(task.cache, key, Bundle(cut.plan(), cut.trace.modules, artifacts))
    return True


def _library(task: Task, cut: Cut, index: int, piece: Piece, limits: Limits) -> bytes | None:
    graph = piece.module(cut.trace.graph)
    try:
        with reasoning_about_sizes(task.config.dynamic_shapes.value):
            library = build_library(graph, limits, task.device, task.config.inductor_options)
    except Exception as error:  # whatever torch refuses: the other form serves
        reason = f"{type(error).__name__}: {error}"
        task.events.emit(
            "compile.library_failed", level=logging.WARNING, piece=index, reason=reason
        )
        return None
    task.events.count("library_compiles")
    return library
