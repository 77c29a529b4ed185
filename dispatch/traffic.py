"""Sizes from observed traffic: how much a list wastes, whether a fit may replace it, and refitting."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    spread, level = [], 0.0
    for step in steps[:-1]:
        level += step
        spread.append(max(0.0, level))
    return spread


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


@dataclass(frozen=True, slots=True)
class Validated:
    """The sizes to use, and the waste of both lists on the traffic held out of the fit."""

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
) -> Validated:
    """Sizes fitted to `counts`, or `default` unless they do better on `held_out`.

    Better is: no more batches without a graph, and a smaller share of padding. `base` is kept
    for the tails.
    """
    fitted = fit_sizes(blur(counts, drift), max_graphs=max_graphs, base=base)
    waste, default_waste = padding_waste(held_out, fitted), padding_waste(held_out, default)
    better = (
        waste.without_graph <= default_waste.without_graph and waste.share < default_waste.share
    )
    return Validated(
        fitted if better else tuple(default),
        fitted,
        waste if better else default_waste,
        default_waste,
    )


@dataclass(frozen=True, slots=True)
class Refit:
    """What to change in a list of sizes; `padded_rows` before and after, over the counted traffic."""

    add: tuple[int, ...]
    drop: tuple[int, ...]
    padded_rows_before: float
    padded_rows_after: float


def refit(
    sizes: Sequence[int],
    counts: Sequence[float],
    *,
    max_graphs: int,
    base: Iterable[int] = (),
    drift: float = DRIFT,
    gain: float = 0.02,
) -> Refit:
    """The change from `sizes` to what fits `counts` now; nothing if it gains less than `gain`.

    `counts` are those of the dispatcher's `Histogram`. `gain` is the share of padded rows, which
    must repay the new captures. The largest of `sizes` and `base` are always kept.
    """
    kept = {*base, *sizes[-1:]}
    fitted = fit_sizes(blur(counts[: max(kept) + 1], drift), max_graphs=max_graphs, base=kept)
    before, after = padding_waste(counts, sizes).padded, padding_waste(counts, fitted).padded
    if after > (1 - gain) * before:
        return Refit((), (), before, before)
    add, drop = set(fitted) - set(sizes), set(sizes) - set(fitted)
    return Refit(tuple(sorted(add)), tuple(sorted(drop)), before, after)
