"""Sizes from observed traffic: a histogram, the waste of given sizes, validated fits, refits."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .fit import fit_sizes

DRIFT = 0.4
"""By what share single batches may differ, up or down, from those of the fit."""

LOADS = (0.4, 2.5)
UNEXPECTED = 0.6
UNEXPECTED_BY_REFIT = 0.2
"""By what factors the load may change, and how much all that was not observed counts in a fit. It
counts less where the next refit follows soon."""


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


def expect(
    counts: Sequence[float],
    *,
    default: Sequence[int],
    widest: int,
    drift: float = DRIFT,
    unexpected: float = UNEXPECTED,
) -> list[float]:
    """The traffic to fit sizes to: as observed, blurred, and as it is under other loads.

    Under another load batches are smaller or larger by a factor, those of decode up to the `widest`
    one, and a little of every size is added. Each of these counts by the padding that the `default`
    sizes have under it: what is compared later is the share of padding, and small batches, which
    have few rows, would otherwise hardly count. A `drift` of 0 leaves `counts` as they are.
    """
    if not drift:
        return list(counts)
    sizes = {*default, len(counts) - 1}
    loads = [_by_padding(blur(_times(counts, load, widest), drift), sizes) for load in LOADS]
    anything = _by_padding([1 / max(1, tokens) for tokens in range(len(counts))], sizes)
    observed = _by_padding(blur(counts, drift), sizes)
    return [
        (1 - unexpected) * seen + unexpected * (0.8 * sum(each) / len(LOADS) + 0.2 * some)
        for seen, some, *each in zip(observed, anything, *loads, strict=True)
    ]


def _times(counts: Sequence[float], factor: float, widest: int) -> list[float]:
    """Every batch `factor` times as large, at most the largest of its kind."""
    changed = [0.0] * len(counts)
    end = len(counts) - 1
    for tokens, count in enumerate(counts):
        if tokens and count:
            most = min(widest, end) if tokens <= widest else end
            changed[min(most, max(1, round(tokens * factor)))] += count
    return changed


def _by_padding(counts: Sequence[float], sizes: Iterable[int]) -> list[float]:
    waste = padding_waste(counts, sizes)
    total = waste.padded - waste.real or waste.real or 1
    return [count / total for count in counts]


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
    widest: int | None = None,
    drift: float = DRIFT,
    unexpected: float = UNEXPECTED,
    cost: Callable[[int], float] = float,
    alignment: int = 1,
) -> Validated:
    """Sizes fitted to `counts` if they do better on `held_out` than `default`, else `default`.

    Better means: fewer batches without a graph; if as many, a lower cost for each real row, or the
    same cost with fewer graphs. A `default` of more than `max_graphs` sizes is thinned out to that
    number. A fit keeps the `widest` decode batch, by default the largest size, and the largest.
    """
    base = sorted({default[-1], min(widest or default[-1], default[-1])})
    expected = expect(counts, default=default, widest=base[0], drift=drift, unexpected=unexpected)
    fitted = fit_sizes(
        expected, max_graphs=max_graphs, base=base[: max_graphs - 1], cost=cost, alignment=alignment
    )
    default = _thinned(default, max_graphs)
    waste, default_waste = padding_waste(held_out, fitted), padding_waste(held_out, default)
    ours, theirs = cost_per_row(held_out, fitted, cost), cost_per_row(held_out, default, cost)
    better = (waste.without_graph, ours, len(fitted)) < (
        default_waste.without_graph, theirs, len(default)
    )  # fmt: skip
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
    widest: int | None = None,
    drift: float = DRIFT,
    cost: Callable[[int], float] = float,
    alignment: int = 1,
    gain: float = 0.01,
) -> Refit:
    """The change from `sizes` to a fit of the `older` traffic, or to the `default` sizes if these
    do better on the `newer`; nothing if that serves at most `gain` more of the batches with a
    graph, and saves less than `gain` of the cost.

    Both come from the dispatcher's `Histogram`, counted up to the largest size that may have a
    graph. A fit ends at the largest batch that occurred, or at the largest default size.
    """
    largest = max(
        (n for each in (older, newer) for n, count in enumerate(each) if count), default=0
    )
    limit = -(-max(largest, default[-1]) // alignment) * alignment + 1
    fit = fit_validated(
        _up_to(limit, older), _up_to(limit, newer), default=default, max_graphs=max_graphs,
        widest=widest, drift=drift, unexpected=UNEXPECTED_BY_REFIT, cost=cost, alignment=alignment,
    )  # fmt: skip
    before, after = cost_per_row(newer, sizes, cost), cost_per_row(newer, fit.sizes, cost)
    lost = padding_waste(newer, fit.sizes).without_graph - padding_waste(newer, sizes).without_graph
    if lost >= -gain * sum(newer) and (lost > 0 or after > (1 - gain) * before):
        return Refit(tuple(sizes), (), (), before, before)
    add, drop = set(fit.sizes) - set(sizes), set(sizes) - set(fit.sizes)
    return Refit(fit.sizes, tuple(sorted(add)), tuple(sorted(drop)), before, after)


def _up_to(limit: int, counts: Sequence[float]) -> list[float]:
    return [*counts[:limit], *[0] * (limit - len(counts))]
