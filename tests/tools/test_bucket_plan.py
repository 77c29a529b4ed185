"""Buckets against the reference tables: ranges, combinations, filters, lookup."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.dispatch import (
    NO_GRAPH,
    Batch,
    Bucket,
    BucketLimits,
    Dispatcher,
    Phase,
    bucket_plan,
)
from piecegraph.errors import InvalidSetting, NoBuckets
from piecegraph.tools.engine.bucket_plan import cheapest, exponential, plan_buckets, ranges

EXP_4096 = BucketLimits(128, 2048, 4096, max_num_reqs=64, max_prefill_reqs=16)
PROMPT, DECODE = Phase.PROMPT, Phase.DECODE


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ((1, 2, 16), "1 2 4 6 10 16"),
        ((1, 2, 64), "1 2 4 8 12 22 36 64"),
        ((1, 2, 256), "1 2 4 8 14 24 42 78 140 256"),
        ((128, 128, 2048), "128 256 384 512 640 768 1024 1280 1664 2048"),
        ((0, 1, 31), "0 1 2 4 8 16 31"),
        ((1, 64, 1000), "1 64 128 192 256 384 448 640 768 1000"),
        ((1, 256, 2304), "1 256 512 768 1024 1280 1536 1792 2048 2304"),
        ((1, 2, 1), "1"),
        ((0, 1, 1), "0 1"),
    ],
)
def test_exponential_vectors(config, values):
    assert exponential(*config) == [int(value) for value in values.split()]


def test_exponential_ends_exactly_without_a_second_value_of_it():
    assert exponential(1, 128, 100) == [1, 100]
    assert exponential(1, 64, 1001)[-1] == 1001


@pytest.mark.parametrize("bad", [(5, 1, 4), (-1, 1, 4), (1, 0, 8), (1, 2, 0)])
def test_a_range_that_cannot_be_is_an_error(bad):
    with pytest.raises(InvalidSetting, match="bucket range"):
        exponential(*bad)


def test_ranges_of_the_worked_example():
    batch, query, context = ranges(PROMPT, EXP_4096)
    assert batch == [1, 2, 4, 6, 10, 16]
    assert query == exponential(128, 128, 2048)
    assert context == [0, 1, 2, 4, 8, 16, 31]
    assert ranges(DECODE, EXP_4096)[:2] == ([1, 2, 4, 8, 12, 22, 36, 64], (1,))


def test_ranges_know_the_size_of_the_cache():
    def last(**limits):
        return ranges(DECODE, replace(EXP_4096, **limits))[2][-1]

    assert last() == 64 * 32
    assert last(total_blocks=100) == 300
    assert last(total_blocks=100, clamped=False) == 64 * 32
    assert last(total_blocks=1000, contiguous=True) == 1000


def test_prompt_filters():
    buckets = plan_buckets(PROMPT, EXP_4096)
    assert all(b.batch * b.query <= 2048 and b.query > 1 for b in buckets)
    assert Bucket(4, 512, 31) in buckets
    assert Bucket(4, 768, 0) not in buckets
    assert list(buckets) == sorted(set(buckets))


def test_decode_filter_and_corrector():
    buckets = plan_buckets(DECODE, EXP_4096)
    assert all(b.batch <= b.context <= 32 * b.batch for b in buckets)
    contiguous = replace(EXP_4096, contiguous=True, total_blocks=1000)
    buckets = plan_buckets(DECODE, contiguous)
    assert Bucket(64, 1, 1) in buckets
    assert Bucket(1, 1, 1000) in buckets


def test_merged_and_sliced_prompts_have_filters_of_their_own():
    merged = replace(EXP_4096, merged_prefill=True)
    assert merged.keeps(Bucket(1, 2048, 16 * 31))
    assert not merged.keeps(Bucket(1, 2048, 16 * 31 + 1))
    sliced = replace(EXP_4096, slice_size=1024)
    assert sliced.keeps(Bucket(1, 8192, 0))
    assert not sliced.keeps(Bucket(1, 8200, 0))
    assert sliced.keeps(Bucket(1, 8200, 1))
    assert sliced.keeps(Bucket(1, 8191, 0))


def test_queries_are_rounded_to_chunks():
    limits = replace(EXP_4096, chunk_size=256)
    assert all(b.query % 256 == 0 for b in plan_buckets(PROMPT, limits))


def test_no_bucket_left_is_an_error_with_what_was_rejected():
    with pytest.raises(NoBuckets, match=r"\(1, 8, 0\)"):
        plan_buckets(PROMPT, BucketLimits(8, 8, 4, max_num_reqs=1))


def test_a_plan_has_one_full_graph_for_each_bucket():
    plan = bucket_plan([Bucket(2, 8, 1), Bucket(4, 1, 6), Bucket(2, 8, 1), Bucket(1, 16, 0)], 4)
    keys = [
        (e.descriptor.num_tokens, e.descriptor.num_reqs, e.descriptor.axes) for e in plan.entries
    ]
    assert keys == [
        (16, 1, (("query", 16), ("context", 0))),
        (16, 2, (("query", 8), ("context", 1))),
        (4, 4, (("query", 1), ("context", 6))),
    ]
    it = Dispatcher(plan, captured=range(3))
    assert it.dispatch(Batch(16, 2, axes={"query": 8, "context": 1})).graph_index == 1
    assert it.dispatch(Batch(16, 2, axes={"query": 8, "context": 0})).graph_index == NO_GRAPH


def test_look_up_examples():
    decode, prompt = plan_buckets(DECODE, EXP_4096), plan_buckets(PROMPT, EXP_4096)
    assert cheapest(decode, Bucket(1, 1, 100)) == (4, 1, 128)
    assert cheapest(decode, Bucket(3, 1, 40)) == (4, 1, 64)
    assert cheapest(decode, Bucket(33, 1, 200)) == (36, 1, 256)
    assert cheapest(prompt, Bucket(1, 129, 3)) == (1, 256, 4)
    assert cheapest(prompt, Bucket(5, 300, 1)) is None


def test_look_up_is_not_lexicographic():
    buckets = [Bucket(1, 2048, 31), Bucket(2, 128, 0)]
    assert cheapest(buckets, Bucket(1, 100, 0)) == (2, 128, 0)
    buckets = [Bucket(4, 128, 0), Bucket(1, 128, 1)]
    assert cheapest(buckets, Bucket(1, 100, 0)) == (1, 128, 1)


shapes = st.tuples(st.integers(1, 20), st.integers(1, 2048), st.integers(0, 32))


@given(shapes)
def test_look_up_pads_least_of_all_that_hold(shape):
    buckets = plan_buckets(PROMPT, EXP_4096)
    found = cheapest(buckets, Bucket(*shape))
    holding = [b for b in buckets if all(has >= asked for has, asked in zip(b, shape, strict=True))]
    assert (found is None) == (not holding)
    if found:
        assert found in holding
        volumes = [b.batch * b.query * (b.context + 1) for b in holding]
        assert found.batch * found.query * (found.context + 1) == min(volumes)


def test_a_measured_cost_chooses_the_bucket():
    buckets = [Bucket(1, 128, 31), Bucket(1, 2048, 0)]
    batch = Bucket(1, 128, 0)
    assert cheapest(buckets, batch) == (1, 2048, 0)  # the smaller volume
    assert cheapest(buckets, batch, lambda each: each.batch * each.query) == (1, 128, 31)
