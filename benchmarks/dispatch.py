"""What does one dispatch cost, compared with a dictionary keyed by frozen dataclasses?

Both serve the same plan and the same batches, in turns, on prebuilt batches. The dictionary's
dispatcher rounds the batch up by table, builds the key of the better mode, looks it up, and builds
the key of the lower mode if it is missing.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from piecegraph.dispatch import (
    Batch,
    BatchDescriptor,
    Decision,
    Dispatcher,
    DispatchPlan,
    GraphMode,
    RuntimeMode,
    default_capture_sizes,
    make_plan,
)

from .timing import collection_off

MAX_NUM_REQS, MAX_NUM_TOKENS = 256, 8192


class DictDispatcher:
    """Padding by table, keys by dataclass, as other engines do, for plans of query length 1."""

    def __init__(self, plan: DispatchPlan, sizes: tuple[int, ...]) -> None:
        self.keys = {
            (entry.mode, entry.descriptor): graph_index
            for graph_index, entry in enumerate(plan.entries)
        }
        self.padded = [sizes[bisect_left(sizes, n)] for n in range(sizes[-1] + 1)]

    def dispatch(self, batch: Batch) -> tuple[RuntimeMode, BatchDescriptor, int]:
        if batch.num_tokens >= len(self.padded):
            return RuntimeMode.NONE, BatchDescriptor(batch.num_tokens), -1
        padded = self.padded[batch.num_tokens]
        if batch.is_decode and batch.query_len is not None and not batch.cascade:
            num_reqs = padded // batch.query_len
            key = BatchDescriptor(padded, num_reqs, batch.query_len, lora_case=batch.num_loras)
            if (graph_index := self.keys.get((RuntimeMode.FULL, key))) is not None:
                return RuntimeMode.FULL, key, graph_index
        key = BatchDescriptor(padded, lora_case=batch.num_loras)
        if (graph_index := self.keys.get((RuntimeMode.PIECEWISE, key))) is not None:
            return RuntimeMode.PIECEWISE, key, graph_index
        return RuntimeMode.NONE, BatchDescriptor(batch.num_tokens), -1


def run(quick: bool) -> dict[str, Any]:
    """Nanoseconds per dispatch, interleaved: `ratios`, `dispatch_ns` and one row for each batch.

    `dict_over_dispatch` is the median over rounds of the two times of one round; each row has
    medians and, as `spread_ns`, the range between the quartiles.
    """
    sizes = default_capture_sizes(MAX_NUM_REQS, MAX_NUM_TOKENS)
    plan = make_plan(GraphMode.FULL_AND_PIECEWISE, sizes, max_num_reqs=MAX_NUM_REQS)
    ours = Dispatcher(plan, captured=range(len(plan.entries)))
    theirs = DictDispatcher(plan, sizes)
    batches = {
        "decode, padded": Batch(67, 67, True, 1),
        "decode, exact": Batch(64, 64, True, 1),
        "mixed, padded": Batch(301, 12),
    }
    rounds, calls = (31, 1_000) if quick else (101, 10_000)
    rows, ratios, medians = [], [], []
    for name, batch in batches.items():
        _check_equal(ours.dispatch(batch), theirs.dispatch(batch))
        pairs = [
            (_time(ours.dispatch, batch, calls), _time(theirs.dispatch, batch, calls))
            for _ in range(rounds)
        ]
        times, beside = zip(*pairs, strict=True)
        ratio = statistics.median(theirs_ns / ours_ns for ours_ns, theirs_ns in pairs)
        rows.append(
            {
                "batch": name,
                "dispatch_ns": statistics.median(times),
                "dispatch_spread_ns": _spread(times),
                "dict_ns": statistics.median(beside),
                "dict_spread_ns": _spread(beside),
                "dict_over_dispatch": ratio,
            }
        )
        ratios.append(ratio)
        medians.append(statistics.median(times))
    return {
        "ratios": {"dict_over_dispatch": statistics.median(ratios)},
        "dispatch_ns": statistics.median(medians),
        "rows": rows,
    }


def _check_equal(decision: Decision, beside: tuple[RuntimeMode, BatchDescriptor, int]) -> None:
    # times of different answers could not be compared
    assert (decision.mode, decision.descriptor, decision.graph_index) == beside


def _time(dispatch: Callable[[Batch], object], batch: Batch, calls: int) -> float:
    """Nanoseconds of this thread's CPU time per call, without the cost of the loop."""
    with collection_off():
        empty = time.thread_time_ns()
        for _ in range(calls):
            pass
        start = time.thread_time_ns()
        for _ in range(calls):
            dispatch(batch)
        return (time.thread_time_ns() - start - (start - empty)) / calls


def _spread(times: tuple[float, ...]) -> float:
    low, _, high = statistics.quantiles(times, n=4)
    return high - low
