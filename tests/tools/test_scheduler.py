"""What every schedule must obey, for any arrivals and any number of blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.errors import InvalidSetting, RequestTooLong
from piecegraph.tools.engine.block_manager import BlockManager
from piecegraph.tools.engine.drafts import Drafter
from piecegraph.tools.engine.scheduler import Request, Scheduler


def make(*lengths, num_blocks=100, block_size=4, max_num_tokens=8, max_num_reqs=4, drafter=None):
    """A scheduler with a request for each (prompt, generate) pair, and the requests."""
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size),
        max_num_tokens=max_num_tokens,
        max_num_reqs=max_num_reqs,
        drafter=drafter,
    )
    requests = [Request(i, [7] * prompt, generate) for i, (prompt, generate) in enumerate(lengths)]
    for request in requests:
        scheduler.add(request)
    return scheduler, requests


def step(scheduler):
    """Run one step, whose drafts are right; returns {request id: query length} and the schedule."""
    schedule = scheduler.schedule()
    scheduler.finish(schedule, [7] * sum(s.samples + len(s.drafts) for s in schedule.shares))
    return {share.request.id: share.query_len for share in schedule.shares}, schedule


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(0, 12),
    st.integers(8, 14),
    st.integers(2, 4),
)
def test_every_request_completes_within_all_limits(
    lengths, max_num_reqs, extra_tokens, num_blocks, block_size
):
    capacity = (num_blocks - 1) * block_size
    scheduler, requests = make(
        *[(prompt, generate) for prompt, generate in lengths if prompt + generate <= capacity],
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_tokens=max_num_reqs + extra_tokens,
        max_num_reqs=max_num_reqs,
    )
    computed = {request.id: 0 for request in requests}
    for _ in range(3000):
        if scheduler.idle:
            break
        schedule = scheduler.schedule()
        for request in schedule.preempted:
            computed[request.id] = 0
        assert 0 < schedule.num_tokens <= scheduler.max_num_tokens
        assert len(scheduler.running) <= max_num_reqs
        assert len({share.request.id for share in schedule.shares}) == len(schedule.shares)
        for share in schedule.shares:
            assert share.start == computed[share.request.id]
            assert share.query_len >= 1
            table = scheduler.blocks.table(share.request.id)
            assert len(table) * block_size >= share.context_len
            assert share.context_len <= len(share.request.tokens)
            assert not share.decoding or share.query_len == 1
            computed[share.request.id] = share.context_len
        scheduler.finish(schedule, [1] * sum(share.samples for share in schedule.shares))
    assert scheduler.idle
    assert all(len(request.tokens) == request.num_tokens_at_end for request in requests)
    assert len(scheduler.blocks.free_blocks) == num_blocks - 1


def test_prompts_are_chunked_under_the_token_budget():
    scheduler, _ = make((20, 1))
    assert [step(scheduler)[0] for _ in range(3)] == [{0: 8}, {0: 8}, {0: 4}]
    assert scheduler.idle


def test_decoding_requests_go_before_prompts():
    scheduler, requests = make((2, 9), max_num_tokens=4)
    step(scheduler)
    scheduler.add(Request(5, [7] * 6, 1))
    shares, schedule = step(scheduler)
    assert shares == {0: 1, 5: 3}
    assert not schedule.is_decode
    step(scheduler)
    assert step(scheduler)[1].is_decode
    assert requests[0].num_computed == 5


def test_drafts_leave_the_token_budget_to_prompts_that_wait():
    scheduler, _ = make((4, 9), drafter=Drafter((3,)))
    step(scheduler)
    assert step(scheduler)[0] == {0: 4}
    scheduler.add(Request(5, [7] * 6, 1))
    assert step(scheduler)[0] == {0: 1, 5: 6}
    assert step(scheduler)[0] == {0: 4}


def test_failure_1_a_prompt_chunk_of_one_token_is_not_a_decode():
    scheduler, _ = make((9, 2))
    step(scheduler)
    shares, schedule = step(scheduler)
    assert shares == {0: 1}
    assert not schedule.is_decode
    assert step(scheduler)[1].is_decode


def test_the_newest_request_is_preempted_keeps_what_it_generated_and_prefills_it():
    scheduler, (old, new) = make((4, 8), (4, 8), num_blocks=5, block_size=4)
    while not (schedule := step(scheduler)[1]).preempted:
        pass
    assert schedule.preempted == (new,)
    known = len(new.tokens)
    assert known > 4
    assert new.num_computed == 0
    while (schedule := step(scheduler)[1]).shares[-1].request is not new:
        pass
    assert schedule.shares[-1].start == 0
    assert not schedule.shares[-1].decoding
    assert new.num_prefill == known
    while not scheduler.idle:
        assert not step(scheduler)[1].preempted
    assert len(old.tokens) == len(new.tokens) == 12


def test_running_requests_stay_within_the_limit():
    scheduler, _ = make(*[(1, 3)] * 6, max_num_reqs=2)
    assert step(scheduler)[0] == {0: 1, 1: 1}
    assert step(scheduler)[0] == {0: 1, 1: 1}


def test_a_request_the_cache_cannot_hold_is_refused():
    with pytest.raises(RequestTooLong, match="13 tokens in total, but the KV cache holds 12"):
        make((10, 3), num_blocks=4, block_size=4)


def test_a_budget_below_the_request_limit_is_refused():
    with pytest.raises(InvalidSetting, match="max_num_tokens"):
        make(max_num_tokens=3, max_num_reqs=4)
