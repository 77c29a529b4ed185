"""Compile a model, or load what an earlier process compiled.

Warm: the bundle under the trace key holds the plan and every artifact; nothing is traced. Cold: the
model is cut into pieces, and each unique piece is loaded from the artifact under its codegen key or
compiled. What was compiled is stored at once, piece by piece, so an interrupted start is not lost.
"""

from __future__ import annotations

from ..cache import Key
from ..cache.lock import Flight
from ..errors import BundleMissing
from .backends.editable_code import unpacked_inductor
from .backends.gc_paused import without_collections
from .backends.inductor import compile_uncached, compiling
from .backends.partition import partitioning
from .backends.registry import Compiler, compiler_named
from .bundle.key_factors import trace_key
from .ir.config import BundleUse
from .ir.request import Task
from .lower.compiled_model import CompiledModel
from .lower.eager_model import uncompiled_model
from .warm import Found, agreed, warm_start


def compile_model(task: Task) -> CompiledModel:
    """The compiled form of a model.

    Raises the errors of tracing, splitting, guards and compilers; BundleMissing where a bundle is
    demanded and there is none to use; RankLost where ranks have to agree and one does not answer.
    """
    with without_collections():
        return _compile_model(task)


def _compile_model(task: Task) -> CompiledModel:
    if not task.config.compile:
        task.events.emit("bundle", hit=False, reason="compile is off")
        return uncompiled_model(task)
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
    with task.cache.single_flight("bundle", key) as flight:
        # whoever held the lock before may have made it
        if flight is Flight.AFTER_OTHERS and isinstance(own, str):
            found = warm_start(task, key, compiler)
            if isinstance(found, Found):
                return found.compiled
        return _cold(task, compiler, key)


def _compiler(task: Task) -> Compiler:
    config = task.config
    if config.compiler != "inductor":
        return compiler_named(config.compiler)
    if config.dump_dir is not None:
        compiler = unpacked_inductor(config.dump_dir, task.events)
    elif not task.cache.enabled:
        compiler = Compiler("inductor", compile_uncached, session=compiling)
    else:
        compiler = compiler_named("inductor")
    return partitioning(compiler) if config.use_inductor_graph_partition else compiler


def _cold(task: Task, compiler: Compiler, key: Key | None) -> CompiledModel:
    from .cold import cold_start  # imports what a warm start has no use for

    return cold_start(task, compiler, key)
