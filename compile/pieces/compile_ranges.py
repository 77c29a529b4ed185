"""Compile ranges and sizes: the stretches of token counts that get code of their own.

A range is compiled with a symbolic size; its ends are the user's endpoints and the thresholds at
which the set of passes changes. A compile size is compiled static. Spans do not overlap: a compile
size is cut out of the range it lies in.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InvalidSetting
from ..ir.config import TOKENS, CompileConfig
from ..passes.graph_pass import thresholds


@dataclass(frozen=True, slots=True)
class Span:
    """Token counts from `low` to `high`, inclusive; `exact` for a compile size."""

    low: int
    high: int
    exact: bool = False


def spans(config: CompileConfig) -> list[Span]:
    """All spans, ascending and without a gap over the served range.

    Raises InvalidSetting for an endpoint or size outside of it.
    """
    least, most = config.limits(TOKENS)
    _inside("compile_ranges", config.compile_ranges, least, most)
    _inside("compile_sizes", config.compile_sizes, least, most)
    within = [end for end in thresholds(config) if least <= end < most]
    ends = sorted({*config.compile_ranges, *within, most})
    found: list[Span] = []
    low = least
    for end in ends:
        for size in sorted({size for size in config.compile_sizes if low <= size <= end}):
            if low < size:
                found.append(Span(low, size - 1))
            found.append(Span(size, size, exact=True))
            low = size + 1
        if low <= end:
            found.append(Span(low, end))
        low = end + 1
    return found


def _inside(name: str, values: tuple[int, ...], least: int, most: int) -> None:
    for value in values:
        if not least <= value <= most:
            raise InvalidSetting(
                name=name,
                value=value,
                reason="it is outside the served range",
                expected=f"{least} to {most}",
            )
