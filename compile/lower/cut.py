"""A model cut into pieces: traced, its guards settled, split, and equal pieces found."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ...events import Events, trace_artifact
from ..guards.prover import GuardBook
from ..guards.trace_with_guards import sound_trace
from ..ir.config import CompileConfig
from ..ir.plan import CompiledSpan, Plan
from ..ir.readable import readable
from ..ir.request import Task
from ..pieces.fingerprint import fingerprint
from ..pieces.piece import Piece, is_size, lift
from ..pieces.split import Predicate, is_splitting, partition_ops, split
from ..trace.dynamo import Trace
from .plan_builder import Planner, base_symbols


@dataclass(frozen=True)
class UniquePiece:
    """A piece that is compiled once, however often it is used."""

    index: int
    digest: str
    piece: Piece


@dataclass(frozen=True)
class Cut:
    """`unique` is in order of first use; `config` has the type of dynamic shapes traced with."""

    trace: Trace
    planner: Planner
    unique: list[UniquePiece]
    guards: GuardBook
    config: CompileConfig
    partition_ops: tuple[str, ...] = ()
    """Ops at which Inductor is to cut; the graph is then whole, one piece."""

    def plan(self, spans: Sequence[CompiledSpan]) -> Plan:
        """The plan, once it is known what serves which span."""
        pieces = [(unique.digest, unique.piece) for unique in self.unique]
        unproved, settled = self.guards.unproved, self.guards.settled
        return self.planner.plan(pieces, spans, unproved, settled, self.partition_ops)


def cut_model(task: Task) -> Cut:
    """Trace and split a model. Raises the errors of tracing, splitting and guards."""
    events = task.events
    traced, guards, config = sound_trace(task)
    trace_artifact("graph", lambda: readable(traced.graph))
    with events.span("split", level=logging.INFO):
        planner = Planner(traced, config)
        splits = is_splitting(traced.graph.graph, config)
        ops: tuple[str, ...] = ()
        if config.use_inductor_graph_partition:
            ops, splits = partition_ops(traced.graph.graph, splits), lambda node: False
        unique = _split(traced, config, splits, ops, planner, events)
    return Cut(traced, planner, unique, guards, config, ops)


def _split(
    traced: Trace,
    config: CompileConfig,
    splits: Predicate,
    ops: tuple[str, ...],
    planner: Planner,
    events: Events,
) -> list[UniquePiece]:
    """Write the plan's steps while pieces are lifted and compared by content."""
    graph = traced.graph.graph
    symbols = base_symbols(traced)
    unique: dict[str, UniquePiece] = {}
    total = 0
    sections = split(
        graph,
        splits,
        lambda node: is_size(node, symbols, traced.shape_env),
    )
    for section in sections:
        if section.splitting:
            planner.calls(section)
            continue
        piece = lift(section, symbols, traced.shape_env)
        digest = fingerprint(piece.graph, traced.graph, ops)
        if not config.dedupe:
            digest = hashlib.sha256(f"{digest} {total}".encode()).hexdigest()
        found = unique.setdefault(digest, UniquePiece(len(unique), digest, piece))
        planner.piece(found.index, piece)
        total += 1
    events.emit("split", pieces=total, unique=len(unique))
    return list(unique.values())
