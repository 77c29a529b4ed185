"""How a model becomes a callable.

    trace key -> bundle -> plan and artifacts -> callable                                warm start
    trace -> guards -> split -> compile missing pieces -> plan -> store -> callable      cold start

A warm start imports neither Dynamo nor Inductor nor sympy: the cold half is imported when it runs.
Each piece is stored as soon as it is compiled, so an interrupted cold start loses little.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..cache import Key
from ..cache.lock import Flight
from ..errors import BundleMissing, PieceFailed
from .backends.editable_code import editable_inductor
from .backends.inductor import compile_uncached, compiling
from .backends.partition import partitioning
from .backends.registry import Compiler, compiler_named
from .bundle.key_factors import obstacle, trace_key
from .ir.compilation import BundleOutcome, CompileRequest
from .ir.config import BundleUse
from .lower.compiled_model import CompiledModel, bind
from .lower.eager_model import eager_model
from .warm import Loaded, NoBundle, load_bundle, ranks_agree

if TYPE_CHECKING:
    from .guards.trace_with_guards import GuardedTrace

CACHE_OFF = "the cache is off"


def compile_model(request: CompileRequest) -> CompiledModel:
    """The compiled form of a model, from its bundle or from a trace.

    Raises the errors of tracing, splitting, guards and compilers; BundleMissing where the settings
    require a bundle and none can be used; RankLost where ranks must agree and one does not answer.
    """
    with _gc_paused():
        if not request.config.compile:
            request.record_bundle(BundleOutcome(hit=False, reason="compile is off"))
            return eager_model(request)
        compiler = _compiler(request)
        key = _bundle_key(request, compiler)
        if isinstance(key, str):
            return _without_bundle(request, compiler, key)
        return _with_bundle(request, compiler, key)


def find_model(request: CompileRequest) -> CompiledModel | NoBundle | str:
    """The model from its bundle, or that there is none yet, or why its code cannot be stored.

    Compiles nothing. Raises BundleMissing and RankLost as `compile_model` does.
    """
    with _gc_paused():
        compiler = _compiler(request)
        key = _bundle_key(request, compiler)
        if isinstance(key, str):
            return key
        found = ranks_agree(request, key, load_bundle(request, key, compiler))
    if isinstance(found, Loaded):
        return found.compiled
    if request.config.bundle is BundleUse.FORCE:
        raise BundleMissing(model=type(request.model).__qualname__, reason=found)
    return NoBundle(request, key, compiler)


def _bundle_key(request: CompileRequest, compiler: Compiler) -> Key | str:
    """The key of the model's bundles, or why none can be stored."""
    if compiler.load is None:
        reason = f"compiler {compiler.name!r} keeps no artifacts"
        return reason if request.cache.enabled else CACHE_OFF
    key = trace_key(request.model, request.config, request.device, request.examples)
    if undescribable := obstacle(key):
        request.record_not_cacheable([undescribable])
        return f"not cacheable: {undescribable}"
    return key


def compile_trace(request: CompileRequest, guarded: GuardedTrace) -> CompiledModel:
    """The compiled form of a graph that the caller traced; stores artifacts and no bundle."""
    with _gc_paused():
        return _compile(request, _compiler(request), guarded, None)


def _with_bundle(request: CompileRequest, compiler: Compiler, key: Key) -> CompiledModel:
    """Warm if every rank can load its bundle, else cold; one process per key compiles."""
    own = load_bundle(request, key, compiler)
    found = ranks_agree(request, key, own)
    if isinstance(found, Loaded):
        return found.compiled
    if request.config.bundle is BundleUse.FORCE:
        raise BundleMissing(model=type(request.model).__qualname__, reason=found)
    with request.cache.single_flight("bundle", key) as flight:
        # the process that held the lock before may have stored the bundle
        if flight is Flight.AFTER_OTHERS and isinstance(own, str):
            found = load_bundle(request, key, compiler)
            if isinstance(found, Loaded):
                return found.compiled
        return _cold_start(request, compiler, key)


def _without_bundle(request: CompileRequest, compiler: Compiler, reason: str) -> CompiledModel:
    """A cold start whose result cannot be stored."""
    if request.config.bundle is BundleUse.FORCE:
        raise BundleMissing(model=type(request.model).__qualname__, reason=reason)
    request.record_bundle(BundleOutcome(hit=False, reason=reason))
    return _cold_start(request, compiler, None)


def _cold_start(request: CompileRequest, compiler: Compiler, key: Key | None) -> CompiledModel:
    """Trace, compile what no earlier process compiled, and store a bundle under `key`."""
    from .guards.trace_with_guards import padded_instead, trace_with_guards

    guarded = trace_with_guards(request)
    try:
        return _compile(request, compiler, guarded, key)
    except PieceFailed:
        padded = padded_instead(request, guarded)
        if padded is None:
            raise
        return _compile(request, compiler, padded, key)


def _compile(
    request: CompileRequest, compiler: Compiler, guarded: GuardedTrace, key: Key | None
) -> CompiledModel:
    from .backends.jobs import compile_pieces
    from .bundle.bundle import store_bundle
    from .ir.locations import graph_source
    from .lower.dependencies import dependencies, drawing
    from .lower.report_plan import dump_plan, report_plan
    from .lower.split_model import split_model

    events = request.events
    split = split_model(guarded, events)
    compiled = compile_pieces(request, split, compiler)
    plan = split.plan(compiled.ranges)

    edges = dependencies(plan)  # raises if the plan's steps cannot run in their order
    events.detail("piece_graph", lambda: drawing(plan, edges))
    report_plan(plan, events)
    if (directory := request.config.dump_dir) is not None:
        dump_plan(plan, directory)
        (directory / "graph.py").write_text(graph_source(split.trace.graph))

    artifacts = [made.blobs for made in compiled.results]
    if key is not None:
        with events.span("cache.store", level=logging.INFO):
            store_bundle(request, key, split.trace, split.config, plan, artifacts)
    return bind(plan, [made.fn for made in compiled.results], request.model, from_bundle=False)


def _compiler(request: CompileRequest) -> Compiler:
    config = request.config
    if config.compiler != "inductor":
        return compiler_named(config.compiler)
    if config.dump_dir is not None:
        compiler = editable_inductor(config.dump_dir, request.events)
    elif not request.cache.enabled:
        compiler = Compiler("inductor", compile_uncached, session=compiling)
    else:
        compiler = compiler_named("inductor")
    return partitioning(compiler) if config.use_inductor_graph_partition else compiler


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Turn off cyclic garbage collection, which takes a tenth of a start.

    Freezing and unfreezing at the end moves new objects to the oldest generation, which saves a
    collection of 0.2 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # do not unfreeze objects that the program froze
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
