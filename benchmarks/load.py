"""The load of a serving benchmark: when requests arrive and how long they are; what came of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from piecegraph.errors import InvalidSetting
from piecegraph.tools.serve.trace import TraceRow

PERCENTILES = (50, 90, 95, 99)
RAMPS = ("linear", "exponential")
OBJECTIVES = ("ttft", "tpot", "e2e")
"""Time to the first token, per output token after it, and of the whole request."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests per second; `inf` lets all arrive at once.

    Times between arrivals follow a gamma distribution of shape `burstiness`: 1 is a Poisson
    process, less is burstier, more is more regular. With `ramp` the rate goes from `rate` at the
    first request to `end_rate` at the last one, linearly or exponentially.
    """

    rate: float
    burstiness: float = 1.0
    ramp: str | None = None
    end_rate: float | None = None

    def times(self, count: int, seed: int) -> list[float]:
        """When each of `count` requests arrives, in seconds; the first at 0."""
        draw = random.Random(seed)
        now, times = 0.0, []
        for n in range(count):
            times.append(now)
            rate = self._rate_at(n / max(count - 1, 1))
            if rate < math.inf:
                now += draw.gammavariate(self.burstiness, 1 / (rate * self.burstiness))
        return times

    def _rate_at(self, share: float) -> float:
        if self.ramp is None or self.end_rate is None:
            return self.rate
        if self.ramp == "linear":
            return self.rate + (self.end_rate - self.rate) * share
        return float(self.rate * (self.end_rate / self.rate) ** share)


def synthetic_rows(
    count: int, num_prompt: int, num_generate: int, *, spread: float, seed: int
) -> list[TraceRow]:
    """Requests with lengths drawn uniformly within `spread` (a share) around the given ones."""
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, round(draw.uniform(mean * (1 - spread), mean * (1 + spread))))

    return [TraceRow(0.0, length(num_prompt), length(num_generate)) for _ in range(count)]


@dataclass(slots=True)
class TimedRequest:
    """One request: its prompt, when it arrived, was sent, and each token came, in seconds."""

    num_prompt: int
    arrival: float
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    error: str | None = None

    def measured(self) -> dict[str, float]:
        """By objective, in seconds from the moment it was sent."""
        first, last = self.tokens[0], self.tokens[-1]
        times = {"ttft": first - self.sent, "e2e": last - self.sent}
        if len(self.tokens) > 1:
            times["tpot"] = (last - first) / (len(self.tokens) - 1)
        return times


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Seconds by objective, from `ttft:200`, in milliseconds. Raises InvalidSetting."""
    objectives = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            objectives[name] = float(limit) / 1000
            if name not in OBJECTIVES or not objectives[name] > 0:
                raise ValueError
        except ValueError:
            raise InvalidSetting(
                name="--goodput",
                value=text,
                reason="it is no objective",
                expected="ttft:MS, tpot:MS or e2e:MS, as in ttft:200",
            ) from None
    return objectives


def summary(requests: Sequence[TimedRequest], objectives: Mapping[str, float]) -> dict[str, Any]:
    """Throughput, goodput and latencies of one run; JSON-able, latencies in milliseconds.

    A request is good if it meets all `objectives`. Failed requests are counted and not measured.
    """
    done = [request for request in requests if request.error is None and request.tokens]
    seconds = max((request.tokens[-1] for request in done), default=0.0)
    per_second = 1 / seconds if seconds else 0.0
    measured = [request.measured() for request in done]
    good = [
        all(seconds_of.get(name, 0.0) <= limit for name, limit in objectives.items())
        for seconds_of in measured
    ]
    times = {name: [each[name] for each in measured if name in each] for name in OBJECTIVES}
    times["itl"] = [b - a for request in done for a, b in pairwise(request.tokens)]
    output = sum(len(request.tokens) for request in done)
    return {
        "requests": len(requests),
        "failed": len(requests) - len(done),
        "errors": sorted({request.error for request in requests if request.error}),
        "seconds": seconds,
        "requests_per_second": len(done) * per_second,
        "output_tokens_per_second": output * per_second,
        "tokens_per_second": (output + sum(each.num_prompt for each in done)) * per_second,
        "goodput": sum(good) * per_second if objectives else None,
        "good_share": sum(good) / len(requests) if objectives and requests else None,
        **{f"{name}_ms": dict(_latency(values)) for name, values in times.items()},
    }


def _latency(seconds: Sequence[float]) -> Iterator[tuple[str, float | int | None]]:
    yield "count", len(seconds)
    yield "mean", float(np.mean(seconds)) * 1000 if seconds else None
    for percent in PERCENTILES:
        yield f"p{percent}", float(np.percentile(seconds, percent)) * 1000 if seconds else None
