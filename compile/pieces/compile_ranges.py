"""Compile ranges: the intervals of token counts that get their own code.

A range is compiled with a symbolic size. It ends at the user's endpoints and at thresholds where
the set of passes changes. A compile size is a range of one size, compiled static. Ranges do not
overlap: a compile size is taken out of the range around it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.config import TOKENS, CompileConfig
from ..passes.graph_pass import thresholds


@dataclass(frozen=True, slots=True)
class CompileRange:
    """Token counts from `low` to `high`, inclusive; `exact` for a compile size."""

    low: int
    high: int
    exact: bool = False


def compile_ranges(config: CompileConfig) -> list[CompileRange]:
    """All ranges, ascending, covering the served range without gaps."""
    least, most = config.limits(TOKENS)
    within = [end for end in thresholds(config.passes) if least <= end < most]
    ends = sorted({*config.ranges, *within, most})
    ranges: list[CompileRange] = []
    low = least
    for end in ends:
        for size in sorted({size for size in config.sizes if low <= size <= end}):
            if low < size:
                ranges.append(CompileRange(low, size - 1))
            ranges.append(CompileRange(size, size, exact=True))
            low = size + 1
        if low <= end:
            ranges.append(CompileRange(low, end))
        low = end + 1
    return ranges
