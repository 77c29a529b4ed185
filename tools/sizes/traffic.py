"""Sizes from observed traffic: the waste of given sizes, validated fits, suggestions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .fit import fit_sizes

DRIFT = 0.4
"""By what share single batches may differ, up or down, from those of the fit."""

LOADS = (0.4, 2.5)
UNEXPECTED = 0.6
"""By what factors the load may change, and how much all that was not observed counts in a fit."""


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
    counts: Sequence[float], *, default: Sequence[int], widest: int, drift: float = DRIFT
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
        (1 - UNEXPECTED) * seen + UNEXPECTED * (0.8 * sum(each) / len(LOADS) + 0.2 * some)
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
    def rows(self) -> float:
        """Padded rows for each real one, 0 if there are none."""
        return self.padded / self.real if self.real else 0.0

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


def fit_validated(
    counts: Sequence[float],
    held_out: Sequence[float],
    *,
    default: Sequence[int],
    max_graphs: int,
    widest: int | None = None,
    drift: float = DRIFT,
    alignment: int = 1,
) -> tuple[int, ...]:
    """Sizes fitted to `counts` if they do better on `held_out` than `default`, else `default`.

    Better means: fewer batches without a graph; if as many, a smaller share of padding, or the
    same share with fewer graphs. A `default` of more than `max_graphs` sizes is thinned out to that
    number. A fit keeps the `widest` decode batch, by default the largest size, and the largest.
    """
    base = sorted({default[-1], min(widest or default[-1], default[-1])})
    expected = expect(counts, default=default, widest=base[0], drift=drift)
    fitted = fit_sizes(
        expected, max_graphs=max_graphs, base=base[: max_graphs - 1], alignment=alignment
    )

    def cost(sizes: Sequence[int]) -> tuple[float, float, int]:
        waste = padding_waste(held_out, sizes)
        return waste.without_graph, waste.share, len(sizes)

    return min(thinned(default, max_graphs), fitted, key=cost)


def thinned(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """At most `most` of `sizes`, evenly chosen, the largest among them."""
    if len(sizes) <= most or most < 2:
        return tuple(sizes[-most:])
    return tuple(sizes[round(place * (len(sizes) - 1) / (most - 1))] for place in range(most))


def suggest_sizes(
    sizes: Sequence[int],
    counts: Sequence[float],
    *,
    widest: int | None = None,
    alignment: int = 1,
    gain: float = 0.05,
) -> tuple[int, ...] | None:
    """At most as many sizes as `sizes`, fitted to `counts` (by number of tokens).

    None unless they serve a share of `gain` more of the batches with a graph, or as many with a
    share of `gain` fewer rows. `counts` ends at the largest size that may have a graph. A fit ends
    at the largest batch that occurred, or at the largest of `sizes`.
    """
    largest = max((n for n, count in enumerate(counts) if count), default=0)
    limit = -(-max(largest, sizes[-1]) // alignment) * alignment + 1
    counts = [*counts[:limit], *[0] * (limit - len(counts))]
    fit = fit_validated(
        counts, counts, default=sizes, max_graphs=len(sizes), widest=widest, alignment=alignment
    )
    now, then = padding_waste(counts, sizes), padding_waste(counts, fit)
    served = now.without_graph - then.without_graph
    cheaper = then.rows < (1 - gain) * now.rows
    return fit if served > gain * sum(counts) or (served >= 0 and cheaper) else None
