"""Default capture sizes against the reference table, and the additions to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.dispatch import (
    DecodeTier,
    align_sizes,
    decode_tiers,
    default_capture_sizes,
    user_capture_sizes,
)
from piecegraph.errors import CaptureSizeInvalid, InvalidSetting

# max_num_reqs, max_num_tokens, query_len, number of sizes up to 512, the last of them
REFERENCE = [
    (256, 8192, 1, 51, 512),
    (1024, 8192, 1, 51, 512),
    (100, 8192, 1, 29, 200),
    (256, 300, 1, 38, 300),
    (1, 8192, 1, 2, 2),
    (16, 2048, 1, 7, 32),
    (64, 8192, 2, 35, 256),
    (256, 8192, 3, 60, 512),
    (256, 8192, 17, 55, 512),
]


@pytest.mark.parametrize(("reqs", "tokens", "query_len", "count", "largest"), REFERENCE)
def test_reference_table(reqs, tokens, query_len, count, largest):
    sizes = default_capture_sizes(reqs, tokens, query_len=query_len)
    dense = [size for size in sizes if size <= 512]
    assert (len(dense), dense[-1]) == (count, largest)
    assert list(sizes) == sorted(set(sizes))


def test_the_common_sizes_to_the_last_one():
    wanted = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    assert default_capture_sizes(256, 8192) == wanted


def test_speculative_tiers_are_added():
    added = {3, 6, 12, 264, 312, 360, 408, 456, 504}
    ladder = set(default_capture_sizes(256, 8192, query_len=3))
    assert ladder - set(default_capture_sizes(256, 8192)) == added | {768}


@pytest.mark.parametrize(("query_len", "count", "largest"), [(3, 56, 504), (5, 51, 500)])
def test_sizes_rounded_to_one_decode_length(query_len, count, largest):
    sizes = default_capture_sizes(256, 8192, query_len=query_len)
    rounded = align_sizes(sizes, query_len, limit=512)
    assert (len(rounded), rounded[-1]) == (count, largest)


def test_a_schedule_of_drafts_becomes_tiers():
    schedule = [3] * 8 + [1] * 24 + [0] * 32
    tiers = decode_tiers(schedule)
    assert tiers == (DecodeTier(1, 64), DecodeTier(2, 32), DecodeTier(4, 8))
    sizes = default_capture_sizes(64, 8192, tiers=tiers)
    assert {64, 2 * 32, 4 * 8, 4 * 4, 2 * 24} <= set(sizes)


limits = st.integers(1, 3000)


@given(limits, limits, st.integers(1, 20))
def test_failure_31_largest_decode_batch_has_a_size(reqs, tokens, query_len):
    sizes = default_capture_sizes(reqs, tokens, query_len=query_len)
    reachable = min(reqs, tokens // query_len) * query_len
    assert reachable == 0 or reachable in sizes
    assert 1 <= sizes[0] <= sizes[-1] <= tokens
    assert all(b <= 2 * max(a, 4) for a, b in zip((1, *sizes), sizes, strict=False))


@given(limits, st.integers(64, 3000), st.integers(1, 64))
def test_aligned_sizes_are_multiples_within_the_budget(reqs, tokens, alignment):
    plain = default_capture_sizes(reqs, tokens)
    sizes = default_capture_sizes(reqs, tokens, alignment=alignment)
    assert all(size % alignment == 0 and size <= tokens for size in sizes)
    for size in plain:
        above = -(-size // alignment) * alignment
        assert above > tokens or above in sizes


def test_an_alignment_that_fits_nowhere_is_an_error():
    with pytest.raises(InvalidSetting, match="alignment = 64"):
        default_capture_sizes(8, 32, alignment=64)


def test_a_user_list_is_taken_as_it_is():
    assert user_capture_sizes([3, 7, 100], max_num_tokens=100) == (3, 7, 100)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([0, 1], r"0 at position 0 of capture_sizes is not positive"),
        ([1, -8], r"-8 at position 1 of capture_sizes is not positive"),
        ([1, 8, 8], r"8 at position 2 of capture_sizes is duplicated"),
        ([1, 8, 4], r"4 at position 2 of capture_sizes follows the larger size 8"),
        ([1, 101], r"101 at position 1 of capture_sizes is above the token limit"),
    ],
)
def test_a_bad_size_is_named(sizes, message):
    with pytest.raises(CaptureSizeInvalid, match=message):
        user_capture_sizes(sizes, max_num_tokens=100)


def test_an_empty_list_is_an_error():
    with pytest.raises(InvalidSetting):
        user_capture_sizes([], max_num_tokens=100)
