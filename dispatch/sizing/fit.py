"""Sizes fitted to traffic: the capture sizes that waste least on an observed histogram.

A one-dimensional k-median with one-sided cost: every batch pays the cost of the next size above
it. Solved exactly by dynamic programming over (number of graphs, largest size so far). With sizes
`c` and `P(c)` batches up to `c`, the cost of a last graph `b` after `a` is `(P(b) - P(a)) cost(b)`,
a line in `cost(b)` for each `a`. Each layer is the lower envelope of lines that come in order of
slope: O(k n) in all (the convex hull trick).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from ...errors import InvalidSetting


def fit_sizes(
    counts: Sequence[float],
    *,
    max_graphs: int | None = None,
    max_bytes: int | None = None,
    graph_bytes: int | None = None,
    cost: Callable[[int], float] = float,
    base: Iterable[int] = (),
    alignment: int = 1,
) -> tuple[int, ...]:
    """The sizes, ascending, that serve `counts` at the least total cost.

    `counts[n]` is how often a batch of n tokens occurs. There are at most `max_graphs` sizes, or
    as many as fit into `max_bytes` at `graph_bytes` for each graph (measured in their shared
    pool). `cost` is the cost of a step by padded tokens, in any unit; the default is the number
    of rows. A larger size that costs less replaces a smaller one. The sizes of `base` are always
    kept, for traffic that was not seen. Sizes are multiples of `alignment`.

    Raises InvalidSetting if there is not exactly one limit on graphs, or if it is too small for
    `base` and the largest batch.
    """
    size_of = _cheapest_above(cost, max([len(counts) - 1, *base], default=0), alignment)
    kept = {size_of[size] for size in base}
    weights: dict[int, float] = dict.fromkeys(kept, 0)
    for tokens, count in enumerate(counts):
        if tokens and count:
            size = size_of[tokens]
            weights[size] = weights.get(size, 0) + count
    sizes = sorted(weights)
    limit = _graph_limit(max_graphs, max_bytes, graph_bytes, len({*kept, *sizes[-1:]}))
    if len(sizes) <= limit:
        return tuple(sizes)
    total = list(accumulate((weights[size] for size in sizes), initial=0))
    costs = [cost(size) for size in sizes]
    forced = {bisect_left(sizes, size) + 1 for size in kept}
    return tuple(sizes[end - 1] for end in _best_ends(total, costs, forced, limit))


def _graph_limit(
    max_graphs: int | None, max_bytes: int | None, graph_bytes: int | None, needed: int
) -> int:
    limit = max_graphs
    if max_graphs is None and max_bytes is not None and graph_bytes:
        limit = max_bytes // graph_bytes
    elif max_bytes is not None:
        limit = None
    if limit is None or limit < max(1, needed):
        raise InvalidSetting(
            name="max_graphs" if max_bytes is None else "max_bytes",
            value=max_graphs if max_bytes is None else max_bytes,
            reason=f"it must be the only limit and allow at least {max(1, needed)} graphs",
            expected="max_graphs, or max_bytes together with graph_bytes",
        )
    return limit


def _cheapest_above(cost: Callable[[int], float], end: int, alignment: int) -> list[int]:
    """For each number of tokens up to `end`, the cheapest size that holds it, smallest first."""
    top = -(-end // alignment) * alignment
    size_of = [top] * (top + 1)
    best = top
    for size in range(top, 0, -alignment):
        if cost(size) <= cost(best):
            best = size
        size_of[size - alignment + 1 : size + 1] = [best] * alignment
    return size_of


def _best_ends(
    total: Sequence[float], costs: Sequence[float], forced: set[int], limit: int
) -> list[int]:
    """Positions 1..n that end the groups of the cheapest partition into `limit` < n groups.

    `total[i]` is the weight of the first i sizes, `costs` are non-decreasing, and every position
    in `forced` ends a group.
    """
    n = len(costs)
    spent = [0.0] + [math.inf] * n
    origins: list[list[int]] = []
    for _ in range(limit):
        spent, origin = _layer(spent, total, costs, forced)
        origins.append(origin)
    ends = [n]
    for origin in reversed(origins[1:]):
        ends.append(origin[ends[-1]])
    return ends[::-1]


def _layer(
    before: Sequence[float], total: Sequence[float], costs: Sequence[float], forced: set[int]
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
        price = costs[end - 1]
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
