"""Compile a model, or load what an earlier process compiled.

Warm: the bundle under the trace key holds the plan and every artifact; nothing is traced. Cold: the
model is cut into pieces, and each unique piece is loaded from the artifact under its codegen key or
compiled. What was compiled is stored at once, piece by piece, so an interrupted start is not lost.
"""

from __future__ import annotations

import logging

from ..cache import Entry, Key
from ..errors import ModelMismatch
from .artifact import LIBRARY, PieceFn
from .bundle import BadBundle, Bundle, read_bundle, store_bundle
from .compile_pieces import compile_pieces
from .compiled_model import CompiledModel, bind
from .compilers import Compiler, compiler_named
from .config import CompileConfig
from .cut import Task, cut_model
from .dump import dump_plan
from .factors import trace_key
from .piece_graph import picture
from .readable import readable
from .tell import tell_lookup, tell_plan
from .uncompiled import uncompiled_model
from .unpacked import unpacked_inductor


def compile_model(task: Task) -> CompiledModel:
    """The compiled form of a model.

    Raises the errors of tracing, splitting, guards and compilers; never one of the cache.
    """
    if not task.config.compile:
        task.events.emit("bundle", hit=False, reason="compile is off")
        return uncompiled_model(task.model, task.config, task.device, task.examples)
    compiler = _compiler(task.config)
    if compiler.load is None:
        reason = f"compiler {compiler.name!r} keeps no artifacts"
        task.events.emit("bundle", hit=False, reason=reason)
        return _cold(task, compiler, None)
    key = trace_key(task.model, task.config, task.device)
    if warm := _warm(task, key, compiler):
        return warm
    with task.cache.single_flight("bundle", key) as held:
        if held and (warm := _warm(task, key, compiler)):
            return warm
        return _cold(task, compiler, key)


def _compiler(config: CompileConfig) -> Compiler:
    if config.dump_dir is not None and config.compiler == "inductor":
        return unpacked_inductor(config.dump_dir)
    return compiler_named(config.compiler)


def _warm(task: Task, key: Key, compiler: Compiler) -> CompiledModel | None:
    events = task.events
    with events.span("cache.lookup", level=logging.INFO):
        entry = task.cache.lookup("bundle", key)
    tell_lookup("bundle", key, entry, task.cache, events)
    if not isinstance(entry, Entry):
        events.emit("bundle", hit=False, reason=entry.reason, detail=entry.detail)
        return None
    try:
        with events.span("bundle.load", level=logging.INFO):
            bundle = read_bundle(entry)
            pieces = _load(task, compiler, entry, bundle)
            compiled = bind(bundle.plan, pieces, task.model, from_bundle=True)
    except (BadBundle, ModelMismatch) as error:
        events.emit("bundle", level=logging.WARNING, hit=False, reason=str(error))
        return None
    events.emit("bundle", hit=True, bytes=entry.size)
    tell_plan(bundle.plan, events)
    return compiled


def _load(task: Task, compiler: Compiler, entry: Entry, bundle: Bundle) -> list[PieceFn]:
    """Ahead-of-time libraries if every artifact has one, else what the compiler stored."""
    if not all(LIBRARY in blobs for blobs in bundle.artifacts):
        assert compiler.load is not None
        return compiler.load(bundle.artifacts)
    from .aoti import load_library

    sizes = bundle.plan.sizes_of_artifacts()
    return [
        load_library(task.cache.path(entry, f"a{index}.{LIBRARY}"), sizes[index], task.device)
        for index in range(len(bundle.artifacts))
    ]


def _cold(task: Task, compiler: Compiler, key: Key | None) -> CompiledModel:
    cut = cut_model(task)
    compiled = compile_pieces(task, cut, compiler)
    plan = cut.plan(compiled.spans)
    drawn = picture(plan)
    task.events.detail("piece_graph", lambda: drawn)
    tell_plan(plan, task.events)
    if (directory := task.config.dump_dir) is not None:
        dump_plan(plan, directory)
        (directory / "graph.py").write_text(readable(cut.trace.graph))
    if key is not None:
        with task.events.span("cache.store", level=logging.INFO):
            store_bundle(task.cache, key, Bundle(plan, cut.trace.modules, compiled.artifacts))
    return bind(plan, compiled.pieces, task.model, from_bundle=False)
