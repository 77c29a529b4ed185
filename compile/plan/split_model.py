"""Split a traced model into pieces, find equal pieces, and write the steps of the plan."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...cache.keys.encoder import Undescribable
from ...events import Events, trace_artifact
from ..conditions.conditions import Conditions
from ..guards.prover import GuardProver
from ..guards.trace_with_guards import GuardedTrace
from ..ir.config import CompileConfig
from ..ir.locations import graph_source
from ..ir.plan import CompiledRange, Plan
from ..pieces.contexts import check_contexts, resolve_contexts
from ..pieces.fingerprint import fingerprint
from ..pieces.piece import Piece, is_size, lift, may_be_handle
from ..pieces.split import split
from ..trace.dynamo import Trace
from ..trace.examples import Leaf
from ..trace.splitting import Predicate, is_splitting
from .plan_builder import PlanBuilder, base_symbols


@dataclass(frozen=True)
class UniquePiece:
    """A piece that is compiled once, however often it is used."""

    index: int
    digest: str
    piece: Piece
    obstacle: str | None = None
    """Why its content has no description: it then equals no other piece, and is not stored."""


@dataclass(frozen=True)
class SplitModel:
    """`unique` is in order of first use; `config` has the type of dynamic shapes traced with."""

    trace: Trace
    planner: PlanBuilder
    unique: list[UniquePiece]
    guards: GuardProver
    config: CompileConfig

    def conditions(self) -> Conditions:
        """What a bundle of the model relies on; a piece without a description is an obstacle."""
        of_pieces = tuple(unique.obstacle for unique in self.unique if unique.obstacle)
        conditions = self.trace.conditions
        return replace(conditions, obstacles=conditions.obstacles or of_pieces)

    def plan(self, ranges: Sequence[CompiledRange]) -> Plan:
        """The plan, once it is known what serves which interval."""
        pieces = [(unique.digest, unique.piece) for unique in self.unique]
        unproved, records = self.guards.unproved, self.guards.records
        return self.planner.plan(pieces, ranges, unproved, records)


def split_model(guarded: GuardedTrace, events: Events) -> SplitModel:
    """Raises UnknownSplittingOp for a rule that does not fit the graph."""
    traced, config = guarded.trace, guarded.config
    trace_artifact("graph", lambda: graph_source(traced.graph))
    with events.span("split", level=logging.INFO):
        planner = PlanBuilder(traced, config)
        splits = is_splitting(traced.graph.graph, config)
        resolve_contexts(traced.graph.graph, splits)
        unique = _unique_pieces(traced, config, splits, planner, events)
    return SplitModel(traced, planner, unique, guarded.guards, config)


def _unique_pieces(
    traced: Trace,
    config: CompileConfig,
    splits: Predicate,
    planner: PlanBuilder,
    events: Events,
) -> list[UniquePiece]:
    """Lift each piece and compare it by content; the planner records the steps on the way."""
    graph = traced.graph.graph
    symbols = base_symbols(traced)
    handles = {
        node: tensor
        for node, tensor in traced.tensors.items()
        if not isinstance(traced.sources[node], Leaf) and may_be_handle(tensor)
    }
    unique: dict[str, UniquePiece] = {}
    total = 0
    for section in split(graph, splits, lambda node: is_size(node, symbols)):
        if section.splitting:
            planner.calls(section)
            continue
        piece = lift(section, symbols, handles)
        check_contexts(piece.outputs)
        obstacle = None
        try:
            digest = fingerprint(piece.graph, traced.graph)
        except Undescribable as error:
            digest, obstacle = secrets.token_hex(32), f"piece {len(unique)}: {error}"
        if not config.dedupe:
            digest = hashlib.sha256(f"{digest} {total}".encode()).hexdigest()
        known_piece = unique.setdefault(digest, UniquePiece(len(unique), digest, piece, obstacle))
        planner.piece(known_piece.index, piece)
        total += 1
    events.emit("split", pieces=total, unique=len(unique))
    return list(unique.values())
