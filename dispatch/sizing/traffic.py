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


class Histogram:
    """The numbers of tokens of the last `window` batches, in bounded memory.

    `add` records one batch; it is the bound method of a C type, since every dispatch calls it.
    """

    def __init__(self, window: int = 1 << 16) -> None:
        self._last: deque[int] = deque(maxlen=window)
        self.add = self._last.append

    def counts(self, limit: int) -> list[int]:
        """How often each number of tokens from 0 to `limit` occurred."""
        seen = Counter(self._last.copy())
        return [seen[num_tokens] for num_tokens in range(limit + 1)]


def blur(counts: Sequence[float], drift: float = DRIFT) -> list[float]:
    """`counts` with the weight of n tokens spread evenly over n - drift·n to n + drift·n.

    A fit on raw counts places its sizes exactly where past batches were, and is worse than the
    default sizes once the load changes. Spreading the counts keeps sizes on both sides.
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


def tail_sizes(counts: Sequence[float], largest: int) -> tuple[int, ...]:
    """Sizes for batches that were not seen: powers of two above all of `counts`, and `largest`."""
    seen = max((tokens for tokens, count in enumerate(counts) if count), default=0)
    powers = (1 << bit for bit in range(seen.bit_length(), largest.bit_length()))
    return (*(power for power in powers if power < largest), largest)


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
    fitted = fit_sizes(blur(counts, drift), max_graphs=max_graphs, base=base, cost=cost)
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
    step = -(-len(sizes) // most)
    return sizes[::-1][::step][::-1]


@dataclass(frozen=True, slots=True)
class Refit:
    """A change to a list of sizes, and the cost of each real row before and after."""

    add: tuple[int, ...]
    drop: tuple[int, ...]
    cost_before: float
    cost_after: float


def refit(
    sizes: Sequence[int],
    counts: Sequence[float],
    *,
    max_graphs: int,
    base: Iterable[int] = (),
    drift: float = DRIFT,
    cost: Callable[[int], float] = float,
    gain: float = 0.02,
) -> Refit:
    """The change from `sizes` to a fit of `counts`; empty if it saves less than `gain`.

    `counts` come from the dispatcher's `Histogram`. `gain` is the share of the cost that the
    change must save to be worth the new captures. `base` and the largest of `sizes` are always
    kept; batches above them are ignored.
    """
    kept = {*base, sizes[-1]}
    seen = counts[: max(kept) + 1]
    fitted = fit_sizes(blur(seen, drift), max_graphs=max_graphs, base=kept, cost=cost)
    before, after = cost_per_row(seen, sizes, cost), cost_per_row(seen, fitted, cost)
    if after > (1 - gain) * before:
        return Refit((), (), before, before)
    add, drop = set(fitted) - set(sizes), set(sizes) - set(fitted)
    return Refit(tuple(sorted(add)), tuple(sorted(drop)), before, after)
