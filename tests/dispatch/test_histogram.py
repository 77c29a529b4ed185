"""The recorder in the dispatcher."""

from __future__ import annotations

from piecegraph.dispatch import Batch, Dispatcher, GraphMode, Histogram, make_plan, refit


def test_the_dispatcher_counts_every_batch_and_refits():
    plan = make_plan(GraphMode.PIECEWISE, [8, 32], max_num_reqs=8)
    it = Dispatcher(plan, captured=[0, 1], histogram=Histogram(32))
    for _ in range(50):
        it.dispatch(Batch(12, 3))
        it.dispatch(Batch(33, 3))
        it.dispatch(Batch(12, 3, num_loras=1))
    assert it.histogram.counts[12] == 100
    assert it.histogram.above == 50
    change = refit((8, 32), it.histogram.counts, max_graphs=3, drift=0.0)
    assert (change.add, change.drop) == ((12,), (8,))


def test_memory_is_bounded_and_old_traffic_fades():
    histogram = Histogram(16, window=100)
    for _ in range(100):
        histogram.add(3)
    for _ in range(1000):
        histogram.add(9)
        histogram.add(10**9)
    assert len(histogram.counts) == 17
    assert histogram.counts[3] == 0
    assert 0 < histogram.counts[9] <= 100
    assert 0 < histogram.above <= 100
