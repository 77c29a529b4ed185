"""Sizes fitted to traffic: the capture sizes that waste least on an observed histogram.

A one-dimensional k-median with one-sided cost: every batch pays the rows of the next size above
it. Solved exactly by dynamic programming over (number of graphs, largest size so far). With sizes
`c` and `P(c)` batches up to `c`, the cost of a last graph `b` after `a` is `(P(b) - P(a)) b`, a
line in `b` for each `a`. Each layer is the lower envelope of lines that come in order of
slope: O(k n) in all (the convex hull trick).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from ...errors import InvalidSetting


def fit_sizes(
    counts: Sequence[float], *, max_graphs: int, base: Iterable[int] = (), alignment: int = 1
) -> tuple[int, ...]:
    """At most `max_graphs` sizes, ascending, that serve `counts` with the fewest padded rows.

    `counts[n]` is how often a batch of n tokens occurs. The sizes of `base` are always kept, for
    traffic that was not seen. Sizes are multiples of `alignment`.

    Raises InvalidSetting if `max_graphs` is too small for `base` and the largest batch.
    """

    def aligned(tokens: int) -> int:
        return -(-tokens // alignment) * alignment

    kept = {aligned(size) for size in base}
    weights: dict[int, float] = dict.fromkeys(kept, 0)
    for tokens, count in enumerate(counts):
        if tokens and count:
            weights[aligned(tokens)] = weights.get(aligned(tokens), 0) + count
    sizes = sorted(weights)
    needed = max(1, len({*kept, *sizes[-1:]}))
    if max_graphs < needed:
        reason = "it has no room for the sizes that are always kept and the largest batch"
        expected = f"{needed} or more"
        raise InvalidSetting(name="max_graphs", value=max_graphs, reason=reason, expected=expected)
    if len(sizes) <= max_graphs:
        return tuple(sizes)
    total = list(accumulate((weights[size] for size in sizes), initial=0))
    forced = {bisect_left(sizes, size) + 1 for size in kept}
    return tuple(sizes[end - 1] for end in _best_ends(total, sizes, forced, max_graphs))


def _best_ends(
    total: Sequence[float], sizes: Sequence[int], forced: set[int], limit: int
) -> list[int]:
    """Positions 1..n that end the groups of the cheapest partition into `limit` < n groups.

    `total[i]` is the weight of the first i sizes. Every position in `forced` ends a group.
    """
    n = len(sizes)
    spent = [0.0] + [math.inf] * n
    origins: list[list[int]] = []
    for _ in range(limit):
        spent, origin = _layer(spent, total, sizes, forced)
        origins.append(origin)
    ends = [n]
    for origin in reversed(origins[1:]):
        ends.append(origin[ends[-1]])
    return ends[::-1]


def _layer(
    before: Sequence[float], total: Sequence[float], sizes: Sequence[int], forced: set[int]
) -> tuple[list[float], list[int]]:
    """Add one group: for each end the least cost, and the end of the previous group."""
    spent = [math.inf] * len(before)
    origin = [0] * len(before)
    lines: deque[int] = deque()
    for end in range(1, len(before)):
        start = end - 1
        if start in forced:
            lines.clear()
        if before[start] < math.inf:
            _add_line(lines, start, before, total)
        if not lines:
            continue
        price = sizes[end - 1]
        while len(lines) > 1 and _at(lines[1], price, before, total) <= _at(
            lines[0], price, before, total
        ):
            lines.popleft()
        spent[end] = total[end] * price + _at(lines[0], price, before, total)
        origin[end] = lines[0]
    return spent, origin


def _at(line: int, price: float, before: Sequence[float], total: Sequence[float]) -> float:
    return before[line] - total[line] * price


def _add_line(
    lines: deque[int], line: int, before: Sequence[float], total: Sequence[float]
) -> None:
    """Append `line` and remove the lines that can no longer be the lowest anywhere."""
    while len(lines) > 1:
        first, last = lines[-2], lines[-1]
        run, rise = total[last] - total[first], before[last] - before[first]
        if (before[line] - before[first]) * run > rise * (total[line] - total[first]):
            break
        lines.pop()
    lines.append(line)
