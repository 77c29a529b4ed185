"""Speculative decoding gives the tokens of greedy decoding, in fewer steps."""

import pytest

from piecegraph.tools.engine.drafts import Drafter, ngram_drafts


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, (9, 1)),
        ([5, 5, 5], 3, (5,)),
        ([4, 7, 4, 8, 4], 1, (8,)),  # the last occurrence
        ([3, 4, 9, 7, 4, 8, 3, 4], 1, (9,)),  # the longest suffix
        ([1, 2, 3], 2, ()),
        ([1], 2, ()),
        ([1, 2, 1], 0, ()),
    ],
)
def test_drafts_follow_the_longest_suffix_that_occurred(tokens, most, drafts):
    assert ngram_drafts(tokens, most) == drafts


def test_all_requests_have_as_many_drafts_or_none_has_any():
    drafter = Drafter([3, 3, 1])
    assert [drafter.most(n) for n in (1, 2, 3, 9)] == [3, 3, 1, 1]
    assert drafter.propose({1: [1, 2, 3], 2: [4]}, 3) == {}
    assert drafter.propose({1: [1, 2, 1], 2: [4]}, 3) == {1: (2, 1, 1), 2: (4, 4, 4)}


@pytest.mark.parametrize("schedule", [[3], [2, 2, 1]])
@pytest.mark.parametrize("num_blocks", [40, 16])
def test_tokens_are_those_of_greedy_decoding(make_world, make_requests, schedule, num_blocks):
    lengths = [(5, 31), (3, 1), (6, 30), (1, 29), (4, 33)]
    limits = {"num_blocks": num_blocks, "max_num_tokens": 24}
    plain, speculative = make_world(**limits), make_world(**limits)
    drafter = speculative.scheduler.drafter = Drafter(schedule)
    expected = plain.serve(make_requests(*lengths))
    assert speculative.serve(make_requests(*lengths)) == expected
    assert 0 < drafter.accepted < drafter.proposed
    assert len(speculative.engine.log.steps) < len(plain.engine.log.steps)
    times = speculative.engine.log.token_times
    assert [len(times[i]) for i in range(5)] == [generate for _, generate in lengths]
    uniform = [b for b in speculative.prepared.batches if b.is_decode and (b.query_len or 0) > 1]
    assert uniform
    assert all(b.query_len for b in speculative.prepared.batches if b.is_decode)
