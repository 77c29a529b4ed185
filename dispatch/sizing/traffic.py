"""Sizes from observed traffic: what a list wastes, whether a fit may replace it, refitting."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .fit import fit_sizes

DRIFT = 0.5
"""How far traffic is expected to move, up or down, between the fit and its use."""


def blur(counts: Sequence[float], drift: float = DRIFT) -> list[float]:
    """`counts` with the weight of n tokens spread evenly over n - drift·n to n + drift·n.

    A fit on raw counts puts its sizes where yesterday's batches were and is worse than a fixed
    ladder once the load moves; the spread keeps sizes in reach of both sides.
    """
    steps = [0.0] * (len(counts) + 1)
    for tokens, count in enumerate(counts):
        if tokens and count:
            low = max(1, int(tokens - drift * tokens))
            high = min(len(counts) - 1, int(tokens + drift * tokens))
            steps[low] += count / (high - low + 1)
            steps[high + 1] -= count / (high - low + 1)
    rounding = 1e-9 * sum(counts)  # what is left of a sum that should be zero
    return [level if level > rounding else 0.0 for level in accumulate(steps[:-1])]


def tail_sizes(counts: Sequence[float], largest: int) -> tuple[int, ...]:
    """A base ladder for what was not seen: powers of two above all of `counts`, and `largest`."""
    seen = max((tokens for tokens, count in enumerate(counts) if count), default=0)
    powers = (1 << bit for bit in range(seen.bit_length(), largest.bit_length()))
    return (*(power for power in powers if power < largest), largest)


@dataclass(frozen=True, slots=True)
class Waste:
    """What padding costs: rows, real and padded, of the batches that a size holds, and the rest."""

    real: float
    padded: float
    without_graph: float

    @property
    def share(self) -> float:
        """Padding rows over padded rows, 0 without any."""
        return 1 - self.real / self.padded if self.padded else 0.0


def padding_waste(counts: Sequence[float], sizes: Iterable[int]) -> Waste:
    """What serving `counts` (by number of tokens) with `sizes` pads."""
    ladder = sorted(sizes)
    real = padded = without = 0.0
    for tokens, count in enumerate(counts):
        if tokens == 0 or not count:
            continue
        if (at := bisect_left(ladder, tokens)) == len(ladder):
            without += count
        else:
            real += tokens * count
            padded += ladder[at] * count
    return Waste(real, padded, without)


def cost_per_row(
    counts: Sequence[float], sizes: Iterable[int], cost: Callable[[int], float] = float
) -> float:
    """What `sizes` cost for each real row that they serve, in the unit of `cost`."""
    ladder = sorted(sizes)
    seen = counts[: max(ladder, default=0) + 1]
    served = [(n, count) for n, count in enumerate(seen) if n and count]
    spent = sum(count * cost(ladder[bisect_left(ladder, n)]) for n, count in served)
    return spent / max(1, sum(n * count for n, count in served))


@dataclass(frozen=True, slots=True)
class Validated:
    """The sizes to use, those fitted, and their and the default's waste on held-out traffic."""

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
    """Sizes fitted to `counts`, or `default` unless they do better on `held_out`.

    Better is: no more batches without a graph, and less cost for each real row. `base` is kept
    for the tails.
    """
    fitted = fit_sizes(blur(counts, drift), max_graphs=max_graphs, base=base, cost=cost)
    waste, default_waste = padding_waste(held_out, fitted), padding_waste(held_out, default)
    better = waste.without_graph <= default_waste.without_graph and (
        cost_per_row(held_out, fitted, cost) < cost_per_row(held_out, default, cost)
    )
    return Validated(
        fitted if better else tuple(default),
        fitted,
        waste if better else default_waste,
        default_waste,
    )


@dataclass(frozen=True, slots=True)
class Refit:
    """What to change in a list of sizes, and the cost for each real row before and after."""

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
    """The change from `sizes` to what fits `counts` now; nothing if it gains less than `gain`.

    `counts` come from the dispatcher's `Histogram`. `gain` is the share of the cost that must
    be saved, so that it repays the new captures. `base` and the last of `sizes`, the largest, are
    always kept; what is above them is not fitted.
    """
    kept = {*base, sizes[-1]}
    seen = counts[: max(kept) + 1]
    fitted = fit_sizes(blur(seen, drift), max_graphs=max_graphs, base=kept, cost=cost)
    before, after = cost_per_row(seen, sizes, cost), cost_per_row(seen, fitted, cost)
    if after > (1 - gain) * before:
        return Refit((), (), before, before)
    add, drop = set(fitted) - set(sizes), set(sizes) - set(fitted)
    return Refit(tuple(sorted(add)), tuple(sorted(drop)), before, after)
