"""Which buckets get a graph within a memory budget, for engines whose graphs are per bucket.

Prompt and decode buckets share the budget; what one phase leaves is used by the other. Based
on the warm-up of Intel Gaudi's vLLM plugin, but with an affine cost model instead of a linear one,
which ignores the constant cost of a graph and can exceed the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...dispatch import Bucket, Phase
from ...errors import UnknownWarmupStrategy


class CostModel(Protocol):
    """Bytes of a graph from its work, the tokens that a step of the bucket computes."""

    def estimate(self, work: int) -> float: ...

    def learn(self, work: int, num_bytes: float) -> None: ...


class AffineCosts:
    """a + b · work, never below a measured cost: a least-squares line, raised if needed.

    It starts from at least two probes, so that the cost of the first graph is known too.
    """

    def __init__(self, probes: Sequence[tuple[int, float]]) -> None:
        self._points = list(probes)
        self._fit()

    def estimate(self, work: int) -> float:
        return self._base + self._slope * work

    def learn(self, work: int, num_bytes: float) -> None:
        self._points.append((work, num_bytes))
        self._fit()

    def _fit(self) -> None:
        count = len(self._points)
        mean = sum(work for work, _ in self._points) / count
        spread = sum((work - mean) ** 2 for work, _ in self._points)
        slope = sum((work - mean) * cost for work, cost in self._points) / spread if spread else 0.0
        self._slope = max(0.0, slope)
        self._base = max(cost - self._slope * work for work, cost in self._points)


def _length(bucket: Bucket) -> int:
    """What grows with the requests of a bucket: their prompts, or in decode their context."""
    return bucket.query if bucket.phase is Phase.PROMPT else bucket.context


ORDERS: dict[str, Callable[[Bucket], tuple[int, ...]]] = {
    "min_tokens": lambda bucket: (bucket.batch * _length(bucket), _length(bucket), bucket.batch),
    "max_bs": lambda bucket: (-bucket.batch, _length(bucket)),
}
"""Strategies by name: the key that buckets are sorted by."""


class BucketWarmup:
    """The buckets of one phase, in the order of a strategy, and which have a graph so far.

    `capture` makes the graph of a bucket and returns its bytes. Raises UnknownWarmupStrategy.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        strategy: str,
        costs: CostModel,
        capture: Callable[[Bucket], float],
    ) -> None:
        if strategy not in ORDERS:
            raise UnknownWarmupStrategy(name=strategy, known=", ".join(ORDERS))
        self.graphed: list[Bucket] = []
        self.used = 0.0
        self._buckets = sorted(buckets, key=ORDERS[strategy])
        self._costs = costs
        self._capture = capture

    @property
    def complete(self) -> bool:
        return len(self.graphed) == len(self._buckets)

    def warm(self, budget: float) -> None:
        """Capture in order what is estimated to fit; a bucket that does not fit is passed over."""
        left = budget
        for bucket in self._buckets:
            work = bucket.batch * bucket.query
            if bucket in self.graphed or self._costs.estimate(work) >= left:
                continue
            taken = self._capture(bucket)
            self.graphed.append(bucket)
            self._costs.learn(work, taken)
            left -= taken
            self.used += taken


def warm_buckets(
    prompt: BucketWarmup, decode: BucketWarmup, budget: float, prompt_ratio: float = 0.3
) -> None:
    """Split `budget` bytes between the phases; the other uses what a complete phase leaves."""
    prompt.warm(prompt_ratio * budget)
    decode.warm(budget - prompt_ratio * budget)
    for phase, other in ((prompt, decode), (decode, prompt)):
        if other.complete and not phase.complete:
            phase.warm(budget - prompt.used - decode.used)
