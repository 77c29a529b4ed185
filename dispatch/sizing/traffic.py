"""Sizes from observed traffic: a histogram, the waste of given sizes, validated fits, refits."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .fit import fit_sizes

DRIFT = 0.5
"""By what share traffic may change, up or down, between the fit and its use."""

GROWTH = (2, 3, 4)
UNEXPECTED = 0.5
"""By what factors the load may grow as well, and how much that counts in a fit."""


class Histogram:
    """The numbers of tokens of the last `window` batches, in bounded memory.

    `add` records one batch; it is the bound method of a C type, since every dispatch calls it.
    """

    def __init__(self, window: int = 1 << 16) -> None:
        self._last: deque[int] = deque(maxlen=window)
        self.add = self._last.append

    def counts(self, limit: int) -> list[int]:
        """How often each number of tokens from 0 to `limit` occurred."""
        return _counted(self._last.copy(), limit)

    def halves(self, limit: int) -> tuple[list[int], list[int]]:
        """The counts of the older and of the newer half of the batches."""
        last = list(self._last.copy())
        middle = len(last) // 2
        return _counted(last[:middle], limit), _counted(last[middle:], limit)

    def clear(self) -> None:
        """Forget all batches."""
        self._last.clear()


def _counted(batches: Iterable[int], limit: int) -> list[int]:
    seen = Counter(batches)
    return [seen[num_tokens] for num_tokens in range(limit + 1)]


def blur(counts: Sequence[float], drift: float = DRIFT) -> list[float]:
    """`counts` with the weight of n tokens spread evenly over n - drift·n to n + drift·n.

    A fit on raw counts places its sizes exactly where past batches were. Spreading the counts keeps
    sizes on both sides.
    """
    steps = [0.0] * (len(counts) + 1)
    for tokens, count in enumerate(counts):
        if tokens and count:
            low = max(1, int(tokens - drift * tokens))
            high = min(len(counts) - 1, int(tokens + drift * tokens))
            steps[low] += count / (high - low + 1)
            steps[high + 1] -= count / (high - low + 1)
    rounding = 1e-9 * sum(counts)  # rounding errors of sums that should be zero
    return [level if level > rounding else 0.0 for level in accumulate(steps[:-1])]


def expect(counts: Sequence[float], drift: float = DRIFT) -> list[float]:
    """The traffic to fit sizes to: half of it as observed, blurred, and half after growth.

    Growth is two to four times as many tokens in a batch, and a little of every size. Without it a
    fit wastes several times as much as the default sizes as soon as the load grows. A `drift` of 0
    leaves `counts` as they are.
    """
    if not drift:
        return list(counts)
    grown = [_share(blur(_times(counts, factor), drift)) for factor in GROWTH]
    unseen = _share([1 / tokens if tokens else 0.0 for tokens in range(len(counts))])
    return [
        (1 - UNEXPECTED) * seen + UNEXPECTED * (0.8 * sum(each) / len(GROWTH) + 0.2 * anything)
        for seen, anything, *each in zip(_share(blur(counts, drift)), unseen, *grown, strict=True)
    ]


def _times(counts: Sequence[float], factor: int) -> list[float]:
    """Every batch `factor` times as large, at most the largest."""
    grown = [0.0] * len(counts)
    for tokens, count in enumerate(counts):
        grown[min(len(counts) - 1, tokens * factor)] += count if tokens else 0
    return grown


def _share(counts: Sequence[float]) -> list[float]:
    total = sum(counts) or 1
    return [count / total for count in counts]


def base_sizes(default: Sequence[int], max_graphs: int) -> tuple[int, ...]:
    """The default sizes that every fit keeps: one in four, at most half of `max_graphs`."""
    stride = max(4, -(-len(default) // max(1, max_graphs // 2)))
    return tuple(default[::-1][::stride][::-1])


@dataclass(frozen=True, slots=True)
class Waste:
    """The cost of padding: real and padded rows, and the number of batches above every size."""

    real: float
    padded: float
    without_graph: float

    @property
    def share(self) -> float:
        """Padding rows over padded rows, 0 if there are none."""
        return 1 - self.real / self.padded if self.padded else 0.0


def padding_waste(counts: Sequence[float], sizes: Iterable[int]) -> Waste:
    """The padding of `counts` (by number of tokens) when served with `sizes`."""
    ordered = sorted(sizes)
    real = padded = without = 0.0
    for tokens, count in enumerate(counts):
        if tokens == 0 or not count:
            continue
        if (at := bisect_left(ordered, tokens)) == len(ordered):
            without += count
        else:
            real += tokens * count
            padded += ordered[at] * count
    return Waste(real, padded, without)


def cost_per_row(
    counts: Sequence[float], sizes: Iterable[int], cost: Callable[[int], float] = float
) -> float:
    """The cost of each real row that `sizes` serve, in the unit of `cost`."""
    ordered = sorted(sizes)
    seen = counts[: max(ordered, default=0) + 1]
    served = [(n, count) for n, count in enumerate(seen) if n and count]
    spent = sum(count * cost(ordered[bisect_left(ordered, n)]) for n, count in served)
    return spent / max(1, sum(n * count for n, count in served))


@dataclass(frozen=True, slots=True)
class Validated:
    """The sizes to use, the fitted ones, and the waste of both on held-out traffic."""

    sizes: tuple[int, ...]
    fitted: tuple[int, ...]
    waste: Waste
    default_waste: Waste

    @property
    def kept_default(self) -> bool:
        return self.sizes != self.fitted


def fit_validated(
    counts: Sequence[float],
    held_out: Sequence[float],
    *,
    default: Sequence[int],
    max_graphs: int,
    base: Iterable[int] = (),
    drift: float = DRIFT,
    cost: Callable[[int], float] = float,
) -> Validated:
    """Sizes fitted to `counts` if they do better on `held_out` than `default`, else `default`.

    Better means: no more batches without a graph, and a lower cost for each real row, or the same
    cost with fewer graphs. A `default` of more than `max_graphs` sizes is thinned out to that
    number. The sizes of `base` are always kept.
    """
    default = _thinned(default, max_graphs)
    fitted = fit_sizes(expect(counts, drift), max_graphs=max_graphs, base=base, cost=cost)
    waste, default_waste = padding_waste(held_out, fitted), padding_waste(held_out, default)
    ours, theirs = cost_per_row(held_out, fitted, cost), cost_per_row(held_out, default, cost)
    better = waste.without_graph <= default_waste.without_graph and (
        (ours, len(fitted)) < (theirs, len(default))
    )
    return Validated(
        fitted if better else tuple(default),
        fitted,
        waste if better else default_waste,
        default_waste,
    )


def _thinned(sizes: Sequence[int], most: int) -> Sequence[int]:
    """At most `most` of `sizes`, evenly chosen, the largest among them."""
    if len(sizes) <= most or most < 2:
        return sizes[-most:]
    return [sizes[round(place * (len(sizes) - 1) / (most - 1))] for place in range(most)]


@dataclass(frozen=True, slots=True)
class Refit:
    """New sizes for a live plan, what they add and drop, and the cost of each real row before and
    after, on the newer part of the traffic."""

    sizes: tuple[int, ...]
    add: tuple[int, ...]
    drop: tuple[int, ...]
    cost_before: float
    cost_after: float


def refit(
    sizes: Sequence[int],
    older: Sequence[float],
    newer: Sequence[float],
    *,
    default: Sequence[int],
    max_graphs: int,
    drift: float = DRIFT,
    cost: Callable[[int], float] = float,
    gain: float = 0.02,
) -> Refit:
    """The change from `sizes` to a fit of the `older` traffic, or to the `default` sizes if these
    do better on the `newer`; nothing if that saves less than `gain`, a share of the cost.

    Both come from the dispatcher's `Histogram`. Batches above the largest default size are ignored.
    """
    base = base_sizes(default, max_graphs)
    limit = default[-1] + 1
    fit = fit_validated(
        older[:limit], newer[:limit], default=default, max_graphs=max_graphs, base=base,
        drift=drift, cost=cost,
    )  # fmt: skip
    before, after = cost_per_row(newer, sizes, cost), cost_per_row(newer, fit.sizes, cost)
    if after > (1 - gain) * before:
        return Refit(tuple(sizes), (), (), before, before)
    add, drop = set(fit.sizes) - set(sizes), set(sizes) - set(fit.sizes)
    return Refit(fit.sizes, tuple(sorted(add)), tuple(sorted(drop)), before, after)
