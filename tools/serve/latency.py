"""Latencies of what was served, as medians and percentiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

PERCENTILES = {"median": 50, "p90": 90, "p99": 99}

Summary = dict[str, float | None]


def summarise(seconds: Sequence[float]) -> Summary:
    """Percentiles by linear interpolation; None where there was nothing to measure."""
    if not seconds:
        return dict.fromkeys(PERCENTILES)
    values = np.percentile(seconds, list(PERCENTILES.values()))
    return dict(zip(PERCENTILES, map(float, values), strict=True))


def token_latencies(
    arrivals: Mapping[int, float], token_times: Mapping[int, Sequence[float]]
) -> dict[str, Summary]:
    """Time from a request's arrival to its first token, and from each token to the next."""
    first = [times[0] - arrivals[request] for request, times in token_times.items()]
    return {
        "time_to_first_token": summarise(first),
        "inter_token": summarise(between_tokens(token_times)),
    }


def between_tokens(token_times: Mapping[int, Sequence[float]]) -> list[float]:
    """Seconds from each token of a request to its next."""
    return [later - earlier for times in token_times.values() for earlier, later in pairwise(times)]
