"""Compile a model, or load what an earlier process compiled.

Warm: the bundle under the trace key holds the plan and every artifact; nothing is traced. Cold: the
model is traced and split, equal pieces are found by content, and each unique piece is loaded from
the artifact under its codegen key or compiled. What was compiled is stored at once, piece by piece,
so an interrupted start is not lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ..cache import Cache, Entry, Key
from ..errors import ModelMismatch, PieceFailed
from ..events import Events, trace_artifact
from ..torch_compat import reasoning_about_sizes
from .artifact import CODE, LIBRARY, Blobs, PieceFn
from .asserts import take_size_asserts
from .bundle import BadBundle, Bundle, read_bundle, store_bundle
from .compiled_model import CompiledModel, bind
from .compilers import Compiler, compiler_named
from .config import CompileConfig
from .examples import TOKENS
from .factors import codegen_key, trace_key
from .fingerprint import fingerprint
from .guards import GuardBook
from .pieces import Piece, lift
from .plan import Plan
from .planning import Planner, base_symbols, symbol_labels
from .readable import readable
from .split import split, splitting_by_name
from .tell import tell_lookup, tell_plan
from .trace import Trace, trace
from .zero_one import hidden_guards

ExampleArguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A model to compile, and with what. `examples` are (args, kwargs) to trace with, if given."""

    model: torch.nn.Module
    config: CompileConfig
    cache: Cache
    events: Events
    device: torch.device
    examples: ExampleArguments | None = None


@dataclass(frozen=True)
class Cut:
    """A traced model cut into pieces: the unique ones with their digests, in order of first use."""

    trace: Trace
    planner: Planner
    unique: list[tuple[str, Piece]]
    guards: GuardBook
    labels: dict[sympy.Symbol, str]
    """The declared name of each symbol."""

    def plan(self) -> Plan:
        return self.planner.plan(self.unique, self.guards.unproved, self.guards.settled)


def compile_model(task: Task) -> CompiledModel:
    """The compiled form of a model.

    Raises the errors of tracing, splitting, guards and compilers; never one of the cache.
    """
    compiler = compiler_named(task.config.compiler)
    if compiler.load is None:
        reason = f"compiler {compiler.name!r} keeps no artifacts"
        task.events.emit("bundle", hit=False, reason=reason)
        cut = cut_model(task)
        compiled = _compile_pieces(task, cut, compiler)
        return _bound(task, cut.plan(), compiled)
    key = trace_key(task.model, task.config, task.device)
    if warm := _warm(task, key, compiler):
        return warm
    with task.cache.single_flight("bundle", key) as held:
        if held and (warm := _warm(task, key, compiler)):
            return warm
        cut = cut_model(task)
        compiled = _compile_pieces(task, cut, compiler)
        plan = cut.plan()
        bundle = Bundle(plan, cut.trace.modules, [blobs for _, blobs in compiled])
        with task.events.span("cache.store", level=logging.INFO):
            store_bundle(task.cache, key, bundle)
    return _bound(task, plan, compiled)


def cut_model(task: Task) -> Cut:
    """Trace and split a model, and find its unique pieces; every guard so far is settled."""
    events = task.events
    traced = trace(task.model, task.config, task.device, task.examples, events)
    labels = symbol_labels(traced)
    book = GuardBook(traced.shape_env, labels, task.config, events)
    book.check_symbols()
    book.settle("dynamo", take_size_asserts(traced.graph.graph, labels, traced.shape_env))
    book.unproved += hidden_guards(task.model, task.config, task.device, task.examples, events)
    trace_artifact("graph", lambda: readable(traced.graph))
    with events.span("split", level=logging.INFO):
        planner = Planner(traced, task.config)
        unique = _split(traced, task.config, planner, events)
    return Cut(traced, planner, unique, book, labels)


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
    """Ahead-of-time libraries if every piece has one, else what the compiler stored."""
    if not all(LIBRARY in blobs for blobs in bundle.artifacts):
        assert compiler.load is not None
        return compiler.load(bundle.artifacts)
    from .aoti import load_library

    return [
        load_library(task.cache.path(entry, f"p{index}.{LIBRARY}"), piece.sizes, task.device)
        for index, piece in enumerate(bundle.plan.pieces)
    ]


def _bound(task: Task, plan: Plan, compiled: Sequence[tuple[PieceFn, Blobs]]) -> CompiledModel:
    tell_plan(plan, task.events)
    return bind(plan, [fn for fn, _ in compiled], task.model, from_bundle=False)


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
        index, _ = unique.setdefault(digest, (len(unique), piece))
        planner.piece(index, piece)
        total += 1
    events.emit("split", pieces=total, unique=len(unique))
    return [(digest, piece) for digest, (_, piece) in unique.items()]


def _compile_pieces(task: Task, cut: Cut, compiler: Compiler) -> list[tuple[PieceFn, Blobs]]:
    """Callable and blobs of each unique piece, one after the other; the first error ends it."""
    done = []
    with task.events.span("compile", level=logging.INFO, pieces=len(cut.unique)):
        for index, (digest, piece) in enumerate(cut.unique):
            cut.guards.check_ends(piece.module(cut.trace.graph), f"piece {index}")
            with task.events.span("compile.piece", piece=index, digest=digest[:12]):
                done.append(_obtain(task, cut.trace, index, digest, piece, compiler))
            cut.guards.settle(f"piece {index}")
    return done


def _obtain(
    task: Task, traced: Trace, index: int, digest: str, piece: Piece, compiler: Compiler
) -> tuple[PieceFn, Blobs]:
    """The callable of one unique piece: from the cache if it is there, else compiled and stored."""
    key = codegen_key(digest, task.config, task.device)
    if compiler.load is not None:
        entry = task.cache.lookup("artifact", key)
        tell_lookup("artifact", key, entry, task.cache, task.events)
        if isinstance(entry, Entry) and CODE in entry.contents:
            return compiler.load([entry.contents])[0], entry.contents
    graph = piece.module(traced.graph)
    about: dict[str, Any] = {
        "piece": index,
        "digest": digest[:12],
        "range": task.config.limits(TOKENS),
    }
    task.events.emit("compile.start", compiler=compiler.name, **about)
    began = time.perf_counter()
    try:
        with reasoning_about_sizes(task.config.dynamic_shapes.value):
            options = task.config.inductor_options
            fn, blobs = compiler.compile(graph, piece.example_values(), options)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise PieceFailed(
            compiler=compiler.name, piece=index, digest=digest[:12], reason=reason
        ) from error
    seconds = time.perf_counter() - began
    task.events.emit("compile.end", seconds=seconds, bytes=sum(map(len, blobs.values())), **about)
    task.events.count(f"{compiler.name}_compiles")
    if blobs:
        task.cache.publish("artifact", key, {"compile_seconds": seconds}, blobs)
    return fn, blobs
