"""The histogram of dispatched batches."""

from __future__ import annotations

from piecegraph.dispatch import Batch, Dispatcher, GraphMode, Histogram, make_plan, refit


def test_the_dispatcher_counts_every_batch_and_refits():
    plan = make_plan(GraphMode.PIECEWISE, [8, 32], max_num_reqs=8)
    it = Dispatcher(plan, captured=[0, 1], histogram=Histogram())
    for _ in range(50):
        it.dispatch(Batch(12, 3))
        it.dispatch(Batch(33, 3))
        it.dispatch(Batch(12, 3, num_loras=1))
    counts = it.histogram.counts(32)
    assert len(counts) == 33
    assert (counts[12], sum(counts)) == (100, 100)
    older, newer = it.histogram.halves(32)
    assert [a + b for a, b in zip(older, newer, strict=True)] == counts
    change = refit((8, 32), older, newer, default=(8, 32), max_graphs=3, drift=0.0)
    assert (change.add, change.drop) == ((12,), (8,))


def test_memory_is_bounded_and_old_traffic_is_forgotten():
    histogram = Histogram(window=100)
    for _ in range(100):
        histogram.add(3)
    for _ in range(60):
        histogram.add(9)
    assert histogram.counts(16)[3] == 40
    for _ in range(1000):
        histogram.add(9)
        histogram.add(10**9)
    assert histogram.counts(16) == [0] * 9 + [50] + [0] * 7
