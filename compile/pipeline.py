"""How a model becomes a callable.

    trace key -> bundle -> plan and artifacts -> callable                                warm start
    trace -> guards -> split -> compile missing pieces -> plan -> store -> callable      cold start

A warm start imports neither Dynamo nor Inductor nor sympy: the cold half is imported when it runs.
Each piece is stored as soon as it is compiled, so an interrupted cold start loses little.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..cache import Key
from ..cache.lock import Flight
from ..errors import BundleMissing, PieceFailed
from .backends.registry import compiler_for
from .bundle.key_factors import trace_key
from .conditions.values import Undescribable
from .eager_model import eager_model
from .ir.compilation import BundleMiss, Compiler, CompileRequest
from .plan.compiled_model import CompiledModel, weights_of
from .warm import Loaded, NoBundle, load_bundle, ranks_agree

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from .guards.trace_with_guards import GuardedTrace


def compile_model(request: CompileRequest) -> CompiledModel:
    """The compiled form of a model, from its bundle or from a trace.

    Raises the errors of tracing, splitting, guards and compilers, and those of `find_model`.
    """
    with gc_paused():
        if not request.config.compile:
            request.record_miss(BundleMiss("compile is off"))
            return eager_model(request)
        result = find_model(request)
        if isinstance(result, CompiledModel):
            return result
        if isinstance(result, BundleMiss):
            request.record_miss(result)
            return _cold_start(request, None)
        return compile_missing(result)


def find_model(request: CompileRequest) -> CompiledModel | NoBundle | BundleMiss:
    """The model from its bundle, or that there is none yet, or why its code cannot be stored.

    Compiles nothing. Raises BundleMissing where the settings require a bundle and none can be used,
    RankLost where ranks must agree and one does not answer.
    """
    with gc_paused():
        with request.events.span("cache.key", level=logging.INFO):
            compiler = compiler_for(request)
            key = _bundle_key(request, compiler)
        if isinstance(key, BundleMiss):
            result: NoBundle | BundleMiss = key
            miss = key
        else:
            local = load_bundle(request, key, compiler)
            agreed = ranks_agree(request, key, local)
            if isinstance(agreed, Loaded):
                return agreed.compiled
            miss = agreed
            result = NoBundle(
                request, key, compiler, local if isinstance(local, BundleMiss) else None
            )
    if request.needs_bundle:
        name = type(request.model).__qualname__
        raise BundleMissing(model=name, reason=str(miss), remedy=miss.remedy)
    return result


def without_bundle(request: CompileRequest) -> NoBundle:
    """What is needed to compile a model of which the stored bundle cannot be used."""
    key = trace_key(request.model, request.config, request.device, request.examples)
    return NoBundle(request, key, compiler_for(request), None)


def compile_missing(missing: NoBundle) -> CompiledModel:
    """Trace and compile a model, and store its bundle; or load what another process has stored.

    Raises the errors of tracing, splitting, guards and compilers.
    """
    request = missing.request
    with request.cache.single_flight("bundle", missing.key, waiting=request.wait) as flight:
        # the process that held the lock before may have stored the bundle
        if flight is Flight.AFTER_OTHERS and missing.may_be_stored():
            stored = load_bundle(request, missing.key, missing.compiler)
            if isinstance(stored, Loaded):
                return stored.compiled
        return _cold_start(request, missing.key)


def compile_trace(request: CompileRequest, guarded: GuardedTrace) -> CompiledModel:
    """The compiled form of a graph that the caller traced; stores artifacts and no bundle."""
    with gc_paused():
        return _compile(request, [guarded], None)


def _cold_start(request: CompileRequest, key: Key | None) -> CompiledModel:
    """Trace, compile what no earlier process compiled, and store a bundle under `key`, if any."""
    from ..torch_compat.tracing.sources import next_source

    first = next_source()
    # torch leaves variables for its settings in the context
    compiled = copy_context().run(_traced_and_compiled, request, key)
    return replace(compiled, sources=range(first, next_source()))


def _traced_and_compiled(request: CompileRequest, key: Key | None) -> CompiledModel:
    with request.events.span("import dynamo", level=logging.INFO):
        from .backends.workers import workers_for
        from .guards.trace_with_guards import split_instead, trace_with_guards

    with workers_for(request) as executor:
        with request.events.span("trace", level=logging.INFO):
            traces = trace_with_guards(request)
        if key is not None:  # the program may have registered kernels or replaced weights since
            key = trace_key(request.model, request.config, request.device, request.examples)
        try:
            return _compile(request, traces, key, executor)
        except PieceFailed:
            split = split_instead(request, traces)
            if split is None:
                raise
            return _compile(request, split, key, executor)


def _compile(
    request: CompileRequest,
    traces: Sequence[GuardedTrace],
    key: Key | None,
    executor: Executor | None = None,
) -> CompiledModel:
    events = request.events
    with events.span("import compiler", level=logging.INFO):
        from .backends.jobs import compile_pieces
        from .bundle.bundle import store_bundle
        from .plan.dependencies import dependencies, drawing
        from .plan.report_plan import dump_plan, report_plan
        from .plan.split_model import conditions_of, plan_of, split_model

    splits = split_model(traces, events)
    compiled = compile_pieces(request, splits, compiler_for(request), executor)
    with events.span("plan", level=logging.INFO):
        plan, conditions = plan_of(splits, compiled.ranges), conditions_of(splits)
        for n, (each, split) in enumerate(zip(plan.traces(), splits, strict=True)):
            graph = dependencies(each)  # raises if the plan's steps cannot run in their order
            events.detail("piece_graph", partial(drawing, graph))
            report_plan(each, events)
            if (directory := request.dump_dir) is not None:
                part = directory if len(splits) == 1 else directory / f"trace_{n}"
                dump_plan(each, split.trace.graph, part)

    artifacts = [made.blobs for made in compiled.results]
    seconds = sum(made.seconds for made in compiled.results)
    request.check_state()
    bundle = None
    if key is not None:
        with events.span("cache.store", level=logging.INFO):
            bundle = store_bundle(request, key, conditions, plan, artifacts, seconds)
    with events.span("link", level=logging.INFO):
        return CompiledModel(
            plan,
            tuple(made.fn for made in compiled.results),
            weights_of(request.model, plan),
            request.model,
            from_bundle=False,
            conditions=conditions.data,
            bundle=bundle,
        )


def _bundle_key(request: CompileRequest, compiler: Compiler) -> Key | BundleMiss:
    """The key of the model's bundles, or why none can be stored."""
    if compiler.load is None:
        if request.cache.enabled:
            return BundleMiss(f"compiler {compiler.name!r} keeps no artifacts")
        absent = request.cache.absent
        return BundleMiss("the cache is off", absent.detail, absent.remedy)
    try:
        return trace_key(request.model, request.config, request.device, request.examples)
    except Undescribable as error:
        request.record_not_cacheable([str(error)])
        return BundleMiss(f"not cacheable: {error}")


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turn off cyclic garbage collection, which takes a tenth of a start.

    Only for a start that other threads wait for: it is off in the whole process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:  # first: what follows may be interrupted
            gc.enable()
        if gc.get_freeze_count() == 0:  # do not unfreeze objects that the program froze
            gc.freeze()
            gc.unfreeze()  # new objects are old ones now, which saves a collection of 0.2 s
