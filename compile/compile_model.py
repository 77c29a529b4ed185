"""Compile a model, or load what an earlier process compiled.

Warm: the bundle under the trace key holds the plan and every artifact; nothing is traced. Cold: the
model is traced and split, equal pieces are found by content, and each unique piece is loaded from
the artifact under its codegen key or compiled. What was compiled is stored at once, piece by piece,
so an interrupted start is not lost.
"""

from __future__ import annotations

import hashlib
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
from .dump import dump_plan
from .examples import TOKENS
from .factors import codegen_key, trace_key
from .fingerprint import fingerprint
from .guards import GuardBook
from .inductor import Blobs, PieceFn, kernels
from .pieces import Piece, lift
from .planning import Planner, base_symbols, symbol_labels
from .readable import readable
from .split import split, splitting_by_name
from .tell import tell_lookup, tell_plan
from .trace import Trace, trace
from .uncompiled import uncompiled_model
from .unpacked import unpacked_inductor

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
    if not config.compile:
        events.emit("bundle", hit=False, reason="compile is off")
        return uncompiled_model(model, config, device, examples)
    compiler = _compiler(config)
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
        with events.span("cache.store", level=logging.INFO):
            cache.publish("bundle", key, meta, contents)
    return compiled


def _compiler(config: CompileConfig) -> Compiler:
    if config.dump_dir is not None and config.compiler == "inductor":
        return unpacked_inductor(config.dump_dir)
    return compiler_named(config.compiler)


def _warm(
    model: torch.nn.Module, key: Key, cache: Cache, events: Events, compiler: Compiler
) -> CompiledModel | None:
    with events.span("cache.lookup", level=logging.INFO):
        entry = cache.lookup("bundle", key)
    tell_lookup("bundle", key, entry, cache, events)
    if not isinstance(entry, Entry):
        events.emit("bundle", hit=False, reason=entry.reason, detail=entry.detail)
        return None
    try:
        with events.span("bundle.load", level=logging.INFO):
            plan, artifacts = read_bundle(entry)
            assert compiler.load is not None
            compiled = bind(plan, compiler.load(artifacts), model, from_bundle=True)
    except (BadBundle, ModelMismatch) as error:
        events.emit("bundle", level=logging.WARNING, hit=False, reason=str(error))
        return None
    events.emit("bundle", hit=True, bytes=entry.size, kernels=kernels(artifacts))
    tell_plan(plan, events)
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
    traced = trace(model, config, device, examples, events)
    book = GuardBook(traced.shape_env, symbol_labels(traced), config, events)
    book.check_symbols()
    book.settle("dynamo")
    trace_artifact("graph", lambda: readable(traced.graph))
    with events.span("split", level=logging.INFO):
        planner = Planner(traced, config)
        unique = _split(traced, config, planner, events)
    loaded: list[tuple[PieceFn, Blobs]] = []
    with events.span("compile", level=logging.INFO, pieces=len(unique)):
        for index, (digest, piece) in enumerate(unique):
            with events.span("compile.piece", piece=index, digest=digest[:12]):
                loaded.append(
                    _obtain(index, digest, piece, traced, config, cache, events, device, compiler)
                )
            book.settle(f"piece {index}")
    plan = planner.plan(unique, book.unproved, book.settled)
    tell_plan(plan, events)
    if config.dump_dir is not None:
        dump_plan(plan, config.dump_dir)
        (config.dump_dir / "graph.py").write_text(readable(traced.graph))
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
    for section in split(graph, splitting_by_name(graph, config.splitting_ops)):
        if section.splitting:
            planner.calls(section)
            continue
        piece = lift(section, symbols, traced.shape_env)
        digest = fingerprint(piece.graph, traced.graph)
        if not config.dedupe:
            digest = hashlib.sha256(f"{digest} {total}".encode()).hexdigest()
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
        tell_lookup("artifact", key, entry, cache, events)
        if isinstance(entry, Entry):
            blobs = dict(entry.contents)
            return compiler.load([blobs])[0], blobs
    graph = piece.module(traced.graph)
    about: dict[str, Any] = {"piece": index, "digest": digest[:12], "range": config.limits(TOKENS)}
    events.emit("compile.start", compiler=compiler.name, **about)
    began = time.perf_counter()
    try:
        with reasoning_about_sizes(config.dynamic_shapes.value):
            fn, blobs = compiler.compile(graph, piece.example_values(), config.inductor_options)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise PieceFailed(
            compiler=compiler.name, piece=index, digest=digest[:12], reason=reason
        ) from error
    seconds = time.perf_counter() - began
    events.emit("compile.end", seconds=seconds, kernels=kernels([blobs])[0], **about)
    events.count(f"{compiler.name}_compiles")
    if blobs:
        cache.publish("artifact", key, {"compile_seconds": seconds}, blobs)
    return fn, blobs
