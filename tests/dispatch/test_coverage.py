"""The coverage proof, checked against every legal batch of small engines."""

from dataclasses import replace

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from piecegraph.dispatch import (
    Bucket,
    BucketLimits,
    BucketStrategy,
    Phase,
    close_holes,
    find_holes,
    plan_buckets,
    read_buckets,
)
from piecegraph.errors import InvalidSetting, NoBuckets

EXP_4096 = BucketLimits(128, 2048, 4096, max_num_reqs=64, max_prefill_reqs=16)


def legal_batches(phase, limits):
    per_request = -(-limits.max_model_len // limits.block_size)
    if phase is Phase.PROMPT:
        for batch in range(1, min(limits.max_prefill_reqs, limits.max_num_reqs) + 1):
            for query in range(1, min(limits.max_model_len, limits.max_num_tokens // batch) + 1):
                rest = limits.max_model_len - query
                for context in range(-(-rest // limits.block_size) + 1):
                    yield Bucket(batch, query, context)
        return
    for batch in range(1, min(limits.max_num_reqs, limits.max_num_tokens) + 1):
        if limits.contiguous:
            last = limits.total_blocks or limits.max_num_reqs * per_request
        else:
            last = min(batch * per_request, 3 * (limits.total_blocks or 10**9))
        for context in range(0 if limits.contiguous else batch, last + 1):
            yield Bucket(batch, 1, context)


engines = st.builds(
    BucketLimits,
    st.sampled_from((2, 4)),
    st.integers(4, 24),
    st.integers(5, 28),
    max_num_reqs=st.integers(1, 6),
    max_prefill_reqs=st.integers(1, 4),
    total_blocks=st.none() | st.integers(4, 20),
    contiguous=st.booleans(),
)
shapes = st.builds(Bucket, st.integers(1, 6), st.integers(1, 24), st.integers(0, 16))


@pytest.mark.parametrize("strategy", [*BucketStrategy, None], ids=str)
@given(st.sampled_from(Phase), engines, st.data())
def test_the_proof_finds_each_hole_and_closing_leaves_none(strategy, phase, limits, data):
    if strategy is not None:
        try:
            buckets = plan_buckets(phase, limits, strategy)
        except (InvalidSetting, NoBuckets):
            assume(False)
    else:
        lines = data.draw(st.sets(shapes, max_size=6))
        buckets = read_buckets("\n".join(str(tuple(shape)) for shape in lines))
    holes = find_holes(phase, limits, buckets)
    legal = list(legal_batches(phase, limits))
    uncovered = [each for each in legal if not any(bucket.holds(each) for bucket in buckets)]
    event(f"{phase}: {'holes' if holes else 'covered'}")
    assert {hole.first for hole in holes} <= set(uncovered)
    for each in uncovered:
        assert any(each.holds(hole.first) and hole.last.holds(each) for hole in holes)
    closed = close_holes(phase, limits, buckets)
    assert set(buckets) <= set(closed)
    for bucket in set(closed) - set(buckets):
        assert phase is Phase.DECODE or bucket.batch * bucket.query <= limits.max_num_tokens
        assert all(
            component <= max(each[i] for each in legal) for i, component in enumerate(bucket)
        )
    assert find_holes(phase, limits, closed) == ()
    assert all(any(bucket.holds(each) for bucket in closed) for each in legal)


def test_the_holes_of_the_worked_example_are_named_and_closed():
    buckets = plan_buckets(Phase.PROMPT, EXP_4096)
    holes = find_holes(Phase.PROMPT, EXP_4096, buckets)
    for shape in ((5, 300, 1), (3, 700, 0)):
        batch = Bucket(*shape)
        assert any(batch.holds(hole.first) and hole.last.holds(batch) for hole in holes)
    closed = close_holes(Phase.PROMPT, EXP_4096, buckets)
    assert find_holes(Phase.PROMPT, EXP_4096, closed) == ()
    assert all(EXP_4096.keeps(bucket) for bucket in closed if bucket.query > 1)


def test_one_hole_within_the_budget_is_closed_by_one_bucket():
    limits = BucketLimits(4, 100, 10, max_num_reqs=3, max_prefill_reqs=3)
    assert close_holes(Phase.PROMPT, limits, ()) == (Bucket(3, 10, 3),)
    assert close_holes(Phase.DECODE, limits, ()) == (Bucket(3, 1, 9),)


def test_the_proof_asks_for_no_more_requests_than_tokens():
    limits = BucketLimits(4, 4, 10, max_num_reqs=6)
    assert close_holes(Phase.DECODE, limits, ()) == (Bucket(4, 1, 12),)


def test_closing_keeps_queries_in_chunks():
    limits = replace(EXP_4096, chunk_size=256)
    closed = close_holes(Phase.PROMPT, limits, plan_buckets(Phase.PROMPT, limits))
    assert find_holes(Phase.PROMPT, limits, closed) == ()
    assert all(bucket.query % 256 == 0 for bucket in closed)


def test_decode_of_the_worked_example_has_no_hole():
    assert not find_holes(Phase.DECODE, EXP_4096, plan_buckets(Phase.DECODE, EXP_4096))
