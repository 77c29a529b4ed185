"""Compile a model, or load what an earlier process compiled.

Warm: the bundle under the trace key holds the plan and every artifact; nothing is traced. Cold: the
model is traced and split, equal pieces are found by content, and each unique piece is loaded from
the artifact under its codegen key or compiled. What was compiled is stored at once, piece by piece,
so an interrupted start is not lost.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from ..cache import Cache, Entry, Key
from ..errors import ModelMismatch, PieceFailed
from ..events import Events, trace_artifact
from ..torch_compat import reasoning_about_sizes
from .bundle import BadBundle, bundle_contents, read_bundle
from .compiled_model import CompiledModel, bind
from .compilers import Compiler, compiler_named
from .config import CompileConfig
from .factors import codegen_key, trace_key
from .fingerprint import fingerprint
from .inductor import Blobs, PieceFn
from .passes.graph_pass import inductor_passes, passes_for
from .piece_graph import picture
from .pieces import Piece, lift
from .planning import Planner, base_symbols
from .sound_trace import sound_trace
from .split import is_splitting, split
from .stitch import stitched_source
from .trace import Trace

ExampleArguments = tuple[tuple[Any, ...], dict[str, Any]]


def compile_model(
    model: torch.nn.Module,
    config: CompileConfig,
    cache: Cache,
    events: Events,
    device: torch.device,
    examples: ExampleArguments | None = None,
) -> CompiledModel:
    """Compiled form of `model` for `device`; `examples` are (args, kwargs) to trace with, if given.

    Raises the errors of tracing, splitting, guards and compilers; never one of the cache.
    """
    compiler = compiler_named(config.compiler)
    key = trace_key(model, config, device)
    if compiler.load is None:
        events.emit("bundle", hit=False, reason=f"compiler {compiler.name} keeps no artifacts")
        return _compile(model, config, cache, events, device, examples, compiler)[0]
    if warm := _warm(model, key, cache, events, compiler):
        return warm
    with cache.single_flight("bundle", key) as held:
        if held and (warm := _warm(model, key, cache, events, compiler)):
            return warm
        compiled, traced, blobs = _compile(model, config, cache, events, device, examples, compiler)
        meta, contents = bundle_contents(compiled.plan, traced.modules, blobs)
        with events.span("cache.store"):
            cache.publish("bundle", key, meta, contents)
    return compiled


def _warm(
    model: torch.nn.Module, key: Key, cache: Cache, events: Events, compiler: Compiler
) -> CompiledModel | None:
    with events.span("cache.lookup"):
        entry = cache.lookup("bundle", key)
    if not isinstance(entry, Entry):
        events.emit("bundle", hit=False, reason=entry.reason, detail=entry.detail)
        return None
    try:
        with events.span("bundle.load"):
            plan, artifacts = read_bundle(entry)
            assert compiler.load is not None
            compiled = bind(plan, compiler.load(artifacts), model, from_bundle=True)
    except (BadBundle, ModelMismatch) as error:
        events.emit("bundle", level=logging.WARNING, hit=False, reason=str(error))
        return None
    events.emit("bundle", hit=True, bytes=entry.size)
    return compiled


def _compile(
    model: torch.nn.Module,
    config: CompileConfig,
    cache: Cache,
    events: Events,
    device: torch.device,
    examples: ExampleArguments | None,
    compiler: Compiler,
) -> tuple[CompiledModel, Trace, list[Blobs]]:
    traced, book, config = sound_trace(model, config, device, examples, events)
    with events.span("split"):
        planner = Planner(traced, config)
        unique = _split(traced, config, planner, events)
    loaded: list[tuple[PieceFn, Blobs]] = []
    for index, (digest, piece) in enumerate(unique):
        book.check_ends(piece.module(traced.graph), f"piece {index}")
        with events.span("compile.piece", piece=index, digest=digest[:12]):
            loaded.append(
                _obtain(index, digest, piece, traced, config, cache, events, device, compiler)
            )
        book.settle(f"piece {index}")
    plan = planner.plan(unique, book.unproved)
    trace_artifact("piece_graph", picture(plan))
    trace_artifact("stitched", stitched_source(plan)[0])
    compiled = bind(plan, [fn for fn, _ in loaded], model, from_bundle=False)
    return compiled, traced, [blobs for _, blobs in loaded]


def _split(
    traced: Trace, config: CompileConfig, planner: Planner, events: Events
) -> list[tuple[str, Piece]]:
    """Write the steps; returns the unique pieces with their digests, in order of first use."""
    graph = traced.graph.graph
    symbols = base_symbols(traced)
    unique: dict[str, tuple[int, Piece]] = {}
    total = 0
    for section in split(graph, is_splitting(graph, config)):
        if section.splitting:
            planner.calls(section)
            continue
        piece = lift(section, symbols, traced.shape_env)
        digest = fingerprint(piece.graph, traced.graph)
        index, _ = unique.setdefault(digest, (len(unique), piece))
        planner.piece(index, piece)
        total += 1
    events.emit("split", pieces=total, unique=len(unique))
    return [(digest, piece) for digest, (_, piece) in unique.items()]


def _obtain(
    index: int,
    digest: str,
    piece: Piece,
    traced: Trace,
    config: CompileConfig,
    cache: Cache,
    events: Events,
    device: torch.device,
    compiler: Compiler,
) -> tuple[PieceFn, Blobs]:
    """The callable of one unique piece: from the cache if it is there, else compiled and stored."""
    key = codegen_key(digest, config, device)
    if compiler.load is not None:
        entry = cache.lookup("artifact", key)
        if isinstance(entry, Entry):
            blobs = dict(entry.contents)
            return compiler.load([blobs])[0], blobs
    graph = piece.module(traced.graph)
    options = {**config.inductor_options, **inductor_passes(passes_for(config), events, index)}
    trace_artifact(f"piece_{index}", graph.print_readable(print_output=False))
    began = time.perf_counter()
    try:
        with reasoning_about_sizes(config.dynamic_shapes.value):
            fn, blobs = compiler.compile(graph, piece.example_values(), options)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise PieceFailed(
            compiler=compiler.name, piece=index, digest=digest[:12], reason=reason
        ) from error
    events.count(f"{compiler.name}_compiles")
    if blobs:
        seconds = time.perf_counter() - began
        cache.publish("artifact", key, {"compile_seconds": seconds}, blobs)
    return fn, blobs
