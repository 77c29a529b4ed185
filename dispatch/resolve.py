"""Mode resolution, before anything is compiled: requested mode, usable mode, and the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


UNDECLARED = "attention, for which attention.support is not set,"
"""The name of the attention group of a model with splitting ops of which nothing is declared."""
UNSPLIT = "a model of which neither splitting_ops nor attention.support says anything"
"""That of a model without splitting ops, which may have breaks and may have no attention."""


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
    mode = LEVEL_MODES[level] if requested is None else requested
    changes = []
    if requested is None:
        changes.append(ModeChange(None, mode, "the optimization level's default"))
    if eager:
        why = "without compiling there are graphs only if graph_mode is set"
        lower: Iterable[tuple[GraphMode, str]] = [(GraphMode.NONE, why)]
    else:
        lower = _lower_modes(mode, support, pieces, query_len, varlen_decode)
    for after, why in lower:
        if after is not mode:
            changes.append(ModeChange(mode, after, why))
            mode = after
    return ResolvedMode(requested, mode, tuple(changes))


def _lower_modes(
    mode: GraphMode,
    support: Mapping[str, AttentionSupport],
    pieces: bool,
    query_len: int,
    varlen_decode: bool,
) -> Iterator[tuple[GraphMode, str]]:
    """The modes that `mode` is lowered to, one after the other, each with the reason."""
    if varlen_decode and mode is GraphMode.FULL:
        mode = GraphMode.FULL_AND_PIECEWISE
        yield mode, "decode of different query lengths has separate graphs"
    group = min(support, key=lambda name: support[name], default="")
    least = support[group] if support else AttentionSupport.ALWAYS
    if mode.decode is RuntimeMode.FULL and least is not AttentionSupport.ALWAYS:
        named = group if group in (UNDECLARED, UNSPLIT) else f"attention group {group!r}"
        can = f"{named} supports {least.name}"
        if mode is GraphMode.FULL:
            if least is AttentionSupport.NEVER:
                raise FullModeUnsupported(reason=_why_never(group, named))
            mode = GraphMode.FULL_AND_PIECEWISE
            yield mode, f"{can}, so mixed batches cannot be FULL"
        if not _decode_can_be_full(least, query_len, varlen_decode):
            mode = GraphMode.PIECEWISE
            yield mode, f"{can}, so decode of query length {query_len} cannot be FULL"
    if mode.needs_pieces and not pieces:
        both = mode is GraphMode.FULL_AND_PIECEWISE
        after = GraphMode.FULL_DECODE_ONLY if both else GraphMode.NONE
        yield after, "the model contains none of the splitting ops, so there are no pieces"


def _why_never(group: str, named: str) -> str:
    if group != UNSPLIT:
        return f"{named} can never be captured"
    return (
        "splitting_ops and attention.support are not set, so it is not known whether anything"
        " needs splitting"
    )


def _decode_can_be_full(least: AttentionSupport, query_len: int, varlen: bool) -> bool:
    if varlen:
        return least is AttentionSupport.ALWAYS
    if query_len > 1:
        return least >= AttentionSupport.UNIFORM_BATCH
    return least >= AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
