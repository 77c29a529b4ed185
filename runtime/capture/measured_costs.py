"""What a replay of each graph, and a step without a graph, takes on dummy batches."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from ...compile.ir.config import TOKENS
from ...dispatch import BatchDescriptor, DispatchPlan, RuntimeMode
from ..backends.protocol import GraphBackend
from .captured_graphs import CapturedGraphs

SIZES_WITHOUT_GRAPH = 16
"""Sizes at which steps without a graph are measured, at most; others are interpolated."""


def measure_costs(
    graphs: CapturedGraphs, plan: DispatchPlan, backend: GraphBackend, repeats: int
) -> tuple[list[float], dict[int, float]]:
    """Seconds by graph index, infinite where nothing is captured, and without a graph by size."""

    def seconds(run: Callable[[], Any]) -> float:
        return median(_one(run, backend) for _ in range(repeats + 1))

    by_graph = [math.inf] * len(plan.entries)
    for graph_index, recording in graphs.recordings():
        entry, sizes = plan.entries[graph_index], graphs.sizes_of(graph_index)
        with graphs.dummy_batch(entry.descriptor, entry.mode, sizes):
            by_graph[graph_index] = seconds(recording.replay)
    without: dict[int, float] = {}
    known = sorted({entry.descriptor.num_tokens for entry in plan.entries})
    for size in known[:: -(-len(known) // SIZES_WITHOUT_GRAPH) or 1] + known[-1:]:
        sizes = graphs.largest_sizes | {TOKENS: size}
        with graphs.dummy_batch(BatchDescriptor(size), RuntimeMode.NONE, sizes) as views:
            without[size] = seconds(partial(graphs.stitched, *views))
    return by_graph, without


def _one(run: Callable[[], Any], backend: GraphBackend) -> float:
    backend.synchronize()
    began = perf_counter()
    run()
    backend.synchronize()
    return perf_counter() - began


def interpolated(by_size: Mapping[int, float]) -> Callable[[int], float]:
    """Seconds of a step of any size: between two measured ones on a line, above in proportion."""
    sizes = sorted(by_size)

    def seconds(size: int) -> float:
        at = bisect_left(sizes, size)
        if at == len(sizes):
            return by_size[sizes[-1]] * size / sizes[-1]
        if at == 0:
            return by_size[sizes[0]]
        low, high = sizes[at - 1], sizes[at]
        return by_size[low] + (by_size[high] - by_size[low]) * (size - low) / (high - low)

    return seconds
