"""Mode resolution, before anything is compiled: requested mode, usable mode, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import FullModeUnsupported
from .modes import AttentionSupport, GraphMode, RuntimeMode

LEVEL_MODES = (
    GraphMode.NONE,
    GraphMode.PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE,
)
"""The graph modes of O0 to O3, for settings that leave it out. O3 also autotunes compile sizes."""


@dataclass(frozen=True, slots=True)
class ModeChange:
    """One step of a resolution; `before` is None if no mode was requested."""

    before: GraphMode | None
    after: GraphMode
    why: str


@dataclass(frozen=True, slots=True)
class ResolvedMode:
    """The mode to use, and every change that led to it with its reason."""

    requested: GraphMode | None
    mode: GraphMode
    reasons: tuple[ModeChange, ...]


def resolve_mode(
    requested: GraphMode | None,
    *,
    support: Mapping[str, AttentionSupport],
    pieces: bool,
    level: int = 2,
    query_len: int = 1,
    varlen_decode: bool = False,
    eager: bool = False,
) -> ResolvedMode:
    """Lower `requested` to a mode that this model supports.

    `requested` None takes the default of `level`. `support` has one entry per attention group;
    the least capable one counts. A model without attention has no entry and supports everything.
    `pieces` says whether the model can be split: it contains at least one splitting op, and no
    attention that cannot be captured stays inside a piece. `query_len` is the longest query of a
    uniform decode request, 1 + speculative tokens. `varlen_decode`: decode batches mix requests of
    different query lengths (adaptive verification).

    Raises FullModeUnsupported if FULL is requested and some group can never be captured.
    """
    resolution = _Resolution(requested, LEVEL_MODES[level])
    if eager:
        resolution.to(
            GraphMode.NONE, "without compiling there are graphs only if graph_mode is set"
        )
        return resolution.resolved()
    if varlen_decode and resolution.mode is GraphMode.FULL:
        why = "decode of different query lengths has separate graphs"
        resolution.to(GraphMode.FULL_AND_PIECEWISE, why)
    _apply_attention(resolution, support, query_len, varlen_decode)
    if resolution.mode.needs_pieces and not pieces:
        both = resolution.mode is GraphMode.FULL_AND_PIECEWISE
        after = GraphMode.FULL_DECODE_ONLY if both else GraphMode.NONE
        resolution.to(after, "the model contains none of the splitting ops, so there are no pieces")
    return resolution.resolved()


class _Resolution:
    """The mode so far, and the changes that led to it."""

    def __init__(self, requested: GraphMode | None, default: GraphMode) -> None:
        self.requested = requested
        self.mode = default
        self.changes: list[ModeChange] = []
        if requested is None:
            self.changes.append(ModeChange(None, default, "the optimization level's default"))
        else:
            self.mode = requested

    def to(self, mode: GraphMode, why: str) -> None:
        if mode is not self.mode:
            self.changes.append(ModeChange(self.mode, mode, why))
            self.mode = mode

    def resolved(self) -> ResolvedMode:
        return ResolvedMode(self.requested, self.mode, tuple(self.changes))


def _apply_attention(
    resolution: _Resolution,
    support: Mapping[str, AttentionSupport],
    query_len: int,
    varlen_decode: bool,
) -> None:
    """Lower FULL routines to what the least capable attention group can run inside a graph."""
    group = min(support, key=lambda name: support[name], default="")
    least = support[group] if support else AttentionSupport.ALWAYS
    if resolution.mode.decode is not RuntimeMode.FULL or least is AttentionSupport.ALWAYS:
        return
    can = f"attention group {group!r} supports {least.name}"
    if resolution.mode is GraphMode.FULL:
        if least is AttentionSupport.NEVER:
            raise FullModeUnsupported(group=group)
        resolution.to(GraphMode.FULL_AND_PIECEWISE, f"{can}, so mixed batches cannot be FULL")
    if not _decode_can_be_full(least, query_len, varlen_decode):
        why = f"{can}, so decode of query length {query_len} cannot be FULL"
        resolution.to(GraphMode.PIECEWISE, why)


def _decode_can_be_full(least: AttentionSupport, query_len: int, varlen: bool) -> bool:
    if varlen:
        return least is AttentionSupport.ALWAYS
    if query_len > 1:
        return least >= AttentionSupport.UNIFORM_BATCH
    return least >= AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
