"""Split a traced model into pieces, find equal pieces, and write the steps of the plan."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ...events import Events, trace_artifact
from ..conditions.conditions import Conditions
from ..conditions.values import Undescribable
from ..guards.prover import GuardProver
from ..guards.trace_with_guards import GuardedTrace
from ..ir.config import TOKENS, CompileConfig, DynamicShapes, Partition
from ..ir.locations import graph_source
from ..ir.plan import CompiledRange, Plan
from ..pieces.contexts import check_contexts, partition_ops, resolve_contexts
from ..pieces.fingerprint import fingerprint
from ..pieces.piece import Piece, lift, may_be_handle
from ..pieces.split import split
from ..trace.dynamo import Trace
from ..trace.examples import Leaf
from ..trace.splitting import Predicate, check_splitting_ops, is_splitting
from .join_plans import join_forms, join_plans
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
    served: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By content hash the token counts of all traces of a model that have the piece."""

    def guards_of(self, unique: UniquePiece) -> GuardProver:
        """The prover, for the token counts that the code of a piece serves."""
        low, high = self.config.limits(TOKENS)
        if self.config.code.dynamic_shapes is not DynamicShapes.UNBACKED:
            low, high = self.served.get(unique.digest, (low, high))
        self.guards.serve(low, high)
        return self.guards

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


def plan_of(splits: Sequence[SplitModel], ranges: Sequence[Sequence[CompiledRange]]) -> Plan:
    """The plan of all traces of a model, given what serves each; raises IntervalsDiffer."""
    forms = list[Plan]()
    pairs = zip(splits, ranges, strict=True)
    for _, form in groupby(pairs, lambda pair: pair[0].config.inputs):
        traces = list(form)
        plans = [split.plan(served) for split, served in traces]
        forms.append(join_plans(plans, [split.config.limits(TOKENS) for split, _ in traces]))
    return join_forms(forms)


def conditions_of(splits: Sequence[SplitModel]) -> Conditions:
    """What a bundle of the model relies on."""
    return Conditions.joined([split.conditions() for split in splits])


def split_model(traces: Sequence[GuardedTrace], events: Events) -> list[SplitModel]:
    """Each trace of a model. Raises UnknownSplittingOp for a rule that fits none of their ops."""
    check_splitting_ops((each.trace.graph.graph for each in traces), traces[0].config)
    models = [_split_trace(each, events) for each in traces]
    served: dict[str, tuple[int, int]] = {}
    for model in models:
        low, high = model.config.limits(TOKENS)
        for unique in model.unique:
            first, last = served.get(unique.digest, (low, high))
            served[unique.digest] = min(first, low), max(last, high)
    return [replace(model, served=served) for model in models]


def _split_trace(guarded: GuardedTrace, events: Events) -> SplitModel:
    traced, config = guarded.trace, guarded.config
    trace_artifact("graph", lambda: graph_source(traced.graph))
    with events.span("split", level=logging.INFO):
        splits = is_splitting(config)
        resolve_contexts(traced.graph.graph, splits)
        if config.partition is Partition.INDUCTOR:
            cut_at, splits = partition_ops(traced.graph.graph, splits), lambda node: False
            config = replace(config, code=replace(config.code, cut_at=cut_at))
        planner = PlanBuilder(traced, config)
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
    weights = {
        node for node in traced.tensors if not isinstance(traced.sources[node], Leaf)
    } - planner.written
    unique: dict[str, UniquePiece] = {}
    total = 0
    for section in split(graph, splits, planner.sizes.__contains__):
        if section.splitting:
            planner.calls(section)
            continue
        piece = lift(section, symbols, planner.sizes, handles, weights)
        check_contexts(piece.outputs)
        obstacle = None
        try:
            digest = fingerprint(piece.graph, traced.graph, config.code.cut_at)
        except Undescribable as error:
            digest, obstacle = secrets.token_hex(32), f"piece {len(unique)}: {error}"
        if not config.dedupe:
            digest = hashlib.sha256(f"{digest} {total}".encode()).hexdigest()
        known_piece = unique.setdefault(digest, UniquePiece(len(unique), digest, piece, obstacle))
        planner.piece(known_piece.index, piece)
        total += 1
    events.emit("split", pieces=total, unique=len(unique))
    return list(unique.values())
