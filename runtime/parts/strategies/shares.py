"""Which graphs fit into the shares of a memory limit, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ....dispatch import CapturePhase


def within_shares(
    phases: Sequence[CapturePhase],
    limit: float,
    taken: Callable[[int], float | None],
    estimate: Callable[[int], float],
) -> Iterator[int]:
    """The graphs to capture, each phase in its order and within its share of `limit` bytes.

    A graph that does not fit is passed over, since a later one may. What is left of the limit goes
    to a phase once the others are complete. `taken` gives the bytes of a graph, None until it is
    captured, which is before the next graph is asked for; `estimate` what it would take. A graph
    whose capture released memory counts as none.
    """

    def bytes_of(*graphs: int) -> float:
        return sum(max(0, taken(i) or 0) for i in graphs)

    def fitting(phase: CapturePhase, left: float) -> Iterator[int]:
        for i in phase.order:
            if taken(i) is None and estimate(i) < left:
                yield i
                left -= bytes_of(i)

    for phase in phases:
        yield from fitting(phase, phase.share * limit - bytes_of(*phase.order))
    for phase in phases:
        others = [i for other in phases if other is not phase for i in other.order]
        if all(taken(i) is not None for i in others):
            yield from fitting(phase, limit - bytes_of(*phase.order, *others))
