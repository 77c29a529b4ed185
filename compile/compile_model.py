"""Compile a model, or load what an earlier process compiled.

Warm: the bundle under the trace key holds the plan and every artifact; nothing is traced. Cold: the
model is cut into pieces, and each unique piece is loaded from the artifact under its codegen key or
compiled. What was compiled is stored at once, piece by piece, so an interrupted start is not lost.
"""

from __future__ import annotations

import logging

from ..cache import Key
from ..errors import BundleMissing
from .bundle import Bundle, store_bundle
from .compile_pieces import compile_pieces
from .compiled_model import CompiledModel, bind
from .compilers import Compiler, compiler_named
from .config import BundleUse
from .cut import Task, cut_model
from .dump import dump_plan
from .factors import trace_key
from .inductor import compile_uncached
from .piece_graph import picture
from .provenance import provenance
from .readable import readable
from .tell import tell_plan
from .uncompiled import uncompiled_model
from .unpacked import unpacked_inductor
from .warm_start import Found, agreed, warm_start


def compile_model(task: Task) -> CompiledModel:
    """The compiled form of a model.

    Raises the errors of tracing, splitting, guards and compilers; BundleMissing where a bundle is
    demanded and there is none to use; RankLost where ranks have to agree and one does not answer.
    """
    if not task.config.compile:
        task.events.emit("bundle", hit=False, reason="compile is off")
        return uncompiled_model(task.model, task.config, task.device, task.examples)
    compiler = _compiler(task)
    if compiler.load is None:
        kept = f"compiler {compiler.name!r} keeps no artifacts"
        reason = kept if task.cache.enabled else "the cache is off"
        if task.config.bundle is BundleUse.FORCE:
            raise BundleMissing(model=type(task.model).__qualname__, reason=reason)
        task.events.emit("bundle", hit=False, reason=reason)
        return _cold(task, compiler, None)
    key = trace_key(task.model, task.config, task.device, task.examples)
    own = warm_start(task, key, compiler)
    found = agreed(task, key, own)
    if isinstance(found, Found):
        return found.compiled
    if task.config.bundle is BundleUse.FORCE:
        raise BundleMissing(model=type(task.model).__qualname__, reason=found)
    with task.cache.single_flight("bundle", key) as held:
        if held and isinstance(own, str):  # whoever held the lock before may have made it
            found = warm_start(task, key, compiler)
            if isinstance(found, Found):
                return found.compiled
        return _cold(task, compiler, key)


def _compiler(task: Task) -> Compiler:
    config = task.config
    if config.compiler != "inductor":
        return compiler_named(config.compiler)
    if config.dump_dir is not None:
        return unpacked_inductor(config.dump_dir, task.events)
    if not task.cache.enabled:
        return Compiler("inductor", compile_uncached)
    return compiler_named("inductor")


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
            bundle = Bundle(plan, provenance(cut.trace, cut.config), compiled.artifacts)
            store_bundle(task.cache, key, bundle, task.model, task.device)
    return bind(plan, compiled.pieces, task.model, from_bundle=False)
