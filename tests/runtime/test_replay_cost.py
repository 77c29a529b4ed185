"""What a replay costs beside the calls themselves."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from piecegraph.runtime.backends.ownership import Ownership
from piecegraph.runtime.capture.recording import Recording, Segment, SegmentKind


def nothing() -> None:
    pass


def test_a_replay_of_65_segments_costs_at_most_1_3_bare_loops() -> None:
    kinds = [SegmentKind.GRAPH, SegmentKind.EAGER] * 32 + [SegmentKind.GRAPH]
    segments = [Segment(kind, [nothing]) for kind in kinds]
    recording = Recording("r", segments, [], Ownership())
    calls = tuple([nothing] * 65)

    def bare() -> None:
        for call in calls:
            call()

    def cost(fn: Any) -> int:
        began = perf_counter_ns()
        for _ in range(100):
            fn()
        return perf_counter_ns() - began

    times = [(cost(bare), cost(recording.replay)) for _ in range(30)]
    floor, replay = map(min, zip(*times, strict=True))  # what else ran at the time only adds
    assert replay <= 1.3 * floor
