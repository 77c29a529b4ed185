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

Exchange = Callable[[str, Mapping[str, Any]], list[dict[str, Any]]]

SIZES_WITHOUT_GRAPH = 16
"""Sizes at which steps without a graph are measured, at most; others are interpolated."""


def measure_costs(
    graphs: CapturedGraphs,
    plan: DispatchPlan,
    backend: GraphBackend,
    exchange: Exchange,
    repeats: int,
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds by graph index, infinite where nothing is captured, and by size without a graph.

    Of several ranks the slowest counts.
    """

    def seconds(run: Callable[[], Any]) -> float:
        return median(_one(run, backend) for _ in range(repeats + 1))

    by_graph = dict.fromkeys(range(len(plan.entries)), math.inf)
    for graph_index, recording in graphs.recordings():
        entry, sizes = plan.entries[graph_index], graphs.sizes_of(graph_index)
        with graphs.dummy_batch(entry.descriptor, entry.mode, sizes):
            by_graph[graph_index] = seconds(recording.replay)
    largest = {symbol.label: symbol.high for symbol in graphs.compiled.plan.symbols}
    known = sorted({entry.descriptor.num_tokens for entry in plan.entries})
    without: dict[int, float] = {}
    for size in known[:: -(-len(known) // SIZES_WITHOUT_GRAPH)] + known[-1:]:
        descriptor, sizes = BatchDescriptor(size), largest | {TOKENS: size}
        with graphs.dummy_batch(descriptor, RuntimeMode.NONE, sizes) as views:
            without[size] = seconds(partial(graphs.stitched, *views))
    stated = [*by_graph.values(), *without.values()]
    answers = (each["seconds"] for each in exchange("costs", {"seconds": stated}))
    slowest = [max(each) for each in zip(*answers, strict=True)]
    end = len(by_graph)
    return (
        dict(zip(by_graph, slowest[:end], strict=True)),
        dict(zip(without, slowest[end:], strict=True)),
    )


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
