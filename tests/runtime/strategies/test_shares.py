"""Shares of a memory limit: the golden vector of vLLM on Gaudi, and limits that hold."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.dispatch import Bucket, BucketMemory, RuntimeMode, bucket_plan
from piecegraph.runtime.parts.strategies.forecast import Forecast, ModeForecast
from piecegraph.runtime.parts.strategies.graph_memory import GraphMemory, within_shares

FULL = RuntimeMode.FULL
BUCKETS = [
    *(Bucket(batch, query, 0) for batch, query in product((1, 2, 4), (128, 256, 512, 1024))),
    *(Bucket(batch, 1, context) for batch, context in product((1, 2, 4, 8, 16), (128, 256))),
]


def work(bucket):
    return bucket.batch * bucket.query


def cost(bucket):
    return 4 + bucket.batch / 2 if bucket.query == 1 else 2 + work(bucket) / 128


def captured(limit, share=0.3, cost=cost, estimate=None):
    """The bytes of the captured buckets of both phases, in the order of their captures."""
    plan = bucket_plan(BUCKETS, 16, BucketMemory(share))
    keys = [(e.descriptor.num_reqs, *(n for _, n in e.descriptor.axes)) for e in plan.entries]
    buckets, taken = [Bucket(*key) for key in keys], dict[int, float]()
    done: dict[Bucket, float] = {}

    def expected(i):
        return estimate(buckets[i], done) if estimate else cost(buckets[i])

    for i in within_shares(plan.phases, limit, taken.get, expected):
        assert i not in taken
        taken[i] = done[buckets[i]] = cost(buckets[i])
    return done


def proportional(bucket, done):
    """The plugin's estimate: what the phase took so far, in proportion to the work."""
    of_phase = {b: n for b, n in done.items() if b.phase is bucket.phase}
    return work(bucket) / (0.001 + sum(map(work, of_phase))) * sum(of_phase.values())


@pytest.mark.parametrize(
    ("limit", "prompt", "decode", "bytes_of"),
    [
        (60, "1x128 2x128 1x256", "16x128 16x256 8x128 8x256 2x128", (11, 45)),
        (
            120,
            "1x128 2x128 1x256 4x128 2x256 1x512 4x256",
            "16x128 16x256 8x128 8x256 4x128 4x256 2x128 2x256 1x128 1x256",
            (39, 71),
        ),
    ],
)
def test_the_golden_vector(limit, prompt, decode, bytes_of):
    done = captured(limit, estimate=proportional)
    prompts = {bucket: n for bucket, n in done.items() if bucket.query > 1}
    decodes = {bucket: n for bucket, n in done.items() if bucket.query == 1}
    assert " ".join(f"{b.batch}x{b.query}" for b in prompts) == prompt
    assert " ".join(f"{b.batch}x{b.context}" for b in decodes) == decode
    assert (sum(prompts.values()), sum(decodes.values())) == bytes_of


amounts = st.floats(0, 100)


@given(amounts, amounts, amounts, st.floats(0, 30_000), st.floats(0, 1))
def test_the_limit_holds_and_what_a_complete_phase_leaves_is_used(base, slope, fixed, limit, share):
    def affine(bucket):
        return fixed + bucket.batch if bucket.query == 1 else base + slope * work(bucket) / 128

    done = captured(limit, share, affine)
    assert sum(done.values()) <= limit
    shares = {"prompt": share * limit, "decode": (1 - share) * limit}
    missing = [bucket for bucket in BUCKETS if bucket not in done]
    for phase in shares:
        used = sum(n for bucket, n in done.items() if bucket.phase == phase)
        waiting = [affine(bucket) for bucket in missing if bucket.phase == phase]
        other_is_complete = all(bucket.phase == phase for bucket in missing)
        left = limit - sum(done.values()) if other_is_complete else shares[phase] - used
        assert used <= shares[phase] + 1e-9 or other_is_complete
        assert all(n >= left - 1e-6 for n in waiting)


def test_graphs_beyond_their_share_are_dropped_last_of_their_order_first():
    """By the forecast, before the first capture. A graph that cannot be captured keeps no share."""
    buckets = [Bucket(batch, query, 0) for batch in (1, 2) for query in (8, 16)]
    buckets += [Bucket(batch, 1, 4) for batch in (1, 2, 3, 4)]
    plan = bucket_plan(buckets, 4, BucketMemory(0.4))
    memory = GraphMemory(plan)
    points = ((1, 10.0), (32, 10.0))
    memory.forecast = Forecast({FULL: ModeForecast(points, ((1, 0.0),))})
    memory.impossible = {plan.phases[1].order[0]}
    prompts = plan.phases[0].order
    for memory.limit, dropped in ((55, [prompts[3], prompts[2]]), (65, [prompts[3]]), (75, [])):
        assert memory.to_drop() == dropped


def test_leftovers_go_both_ways_and_a_release_counts_as_nothing():
    assert len(captured(220, 0.01)) == len(captured(220, 0.99)) == len(BUCKETS)
    most = BUCKETS[-1]
    released = captured(60, cost=lambda bucket: -1000 if bucket == most else cost(bucket))
    assert sum(n for n in released.values() if n > 0) <= 60
