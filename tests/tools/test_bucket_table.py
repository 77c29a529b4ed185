"""Buckets against the reference tables: ranges, combinations, filters, lookup, fallback."""

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
from piecegraph.errors import BeyondLimits, InvalidSetting, NoBuckets
from piecegraph.tools.engine.bucket_ranges import (
    BucketStrategy,
    exponential,
    linear,
    padding_aware,
    ranges,
)
from piecegraph.tools.engine.bucket_table import (
    BucketTable,
    coarse,
    filter_buckets,
    plan_buckets,
)

EXP, LIN, PAD = BucketStrategy.EXPONENTIAL, BucketStrategy.LINEAR, BucketStrategy.PADDING_AWARE
EXP_4096 = BucketLimits(128, 2048, 4096, max_num_reqs=64, max_prefill_reqs=16)
PROMPT, DECODE = Phase.PROMPT, Phase.DECODE


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ((1, 32, 128), "1 2 4 8 16 32 64 96 128"),
        ((1, 32, 100), "1 2 4 8 16 32 64 96 100"),
        ((1, 32, 5), "1 2 4 5"),
        ((2, 32, 64), "2 4 8 16 32 64"),
        ((3, 16, 64), "3 6 12 16 32 48 64"),
        ((64, 32, 128), "64 96 128"),
        ((0, 4, 20), "0 4 8 12 16 20"),
        ((0, 1, 5), "0 1 2 3 4 5"),
        ((128, 128, 1024), "128 256 384 512 640 768 896 1024"),
        ((0, 4, 0), "0"),
    ],
)
def test_linear_vectors(config, values):
    assert linear(*config) == [int(value) for value in values.split()]


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


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ((1, 1, 16), "1 2 4 6 8 12 16"),
        ((1, 2, 64), "1 2 4 6 8 12 16 22 30 32 44 48 64"),
        ((1, 2, 128), "1 2 4 6 8 12 16 22 30 32 44 60 64 86 96 128"),
        ((128, 128, 2048), "128 256 384 512 640 768 1024 1280 1536 2048"),
        (
            (128, 128, 8192),
            "128 256 384 512 640 768 1024 1280 1664 2048 2688 3584 4096 5376 6144 8192",
        ),
        ((16, 16, 128), "16 32 48 64 80 96 128"),
        ((0, 1, 1), "0 1"),
    ],
)
def test_padding_aware_vectors(config, values):
    assert padding_aware(*config) == [int(value) for value in values.split()]


@pytest.mark.parametrize(
    "make",
    [
        lambda: linear(5, 1, 4),
        lambda: linear(-1, 1, 4),
        lambda: exponential(1, 0, 8),
        lambda: padding_aware(1, 2, 0),
    ],
)
def test_a_range_that_cannot_be_is_an_error(make):
    with pytest.raises(InvalidSetting, match="bucket range"):
        make()


def test_ranges_of_the_worked_example():
    batch, query, context = ranges(PROMPT, EXP_4096, EXP)
    assert batch == [1, 2, 4, 6, 10, 16]
    assert query == exponential(128, 128, 2048)
    assert context == [0, 1, 2, 4, 8, 16, 31]
    assert ranges(DECODE, EXP_4096, EXP)[:2] == ([1, 2, 4, 8, 12, 22, 36, 64], (1,))


@pytest.mark.parametrize("strategy", BucketStrategy)
def test_ranges_know_the_size_of_the_cache(strategy):
    def last(**limits):
        return ranges(DECODE, replace(EXP_4096, **limits), strategy)[2][-1]

    assert last() == 64 * 32
    assert last(total_blocks=100) == 300
    assert last(total_blocks=100, clamped=False) == 64 * 32
    assert last(total_blocks=1000, contiguous=True) == 1000


def test_prompt_filters():
    buckets = plan_buckets(PROMPT, EXP_4096, EXP)
    assert all(b.batch * b.query <= 2048 and b.query > 1 for b in buckets)
    assert Bucket(4, 512, 31) in buckets
    assert Bucket(4, 768, 0) not in buckets
    assert list(buckets) == sorted(set(buckets))


def test_decode_filter_and_corrector():
    buckets = plan_buckets(DECODE, EXP_4096, EXP)
    assert all(b.batch <= b.context <= 32 * b.batch for b in buckets)
    contiguous = replace(EXP_4096, contiguous=True, total_blocks=1000)
    buckets = plan_buckets(DECODE, contiguous, LIN)
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
    assert all(b.query % 256 == 0 for b in plan_buckets(PROMPT, limits, EXP))


def test_no_bucket_left_is_an_error_with_what_was_rejected():
    with pytest.raises(NoBuckets, match=r"\(2, 2048, 0\)"):
        filter_buckets([Bucket(2, 2048, 0)], EXP_4096)
    with pytest.raises(NoBuckets, match="none"):
        filter_buckets([], EXP_4096)


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


@pytest.mark.parametrize(
    ("value", "base", "wanted"),
    [
        (0, 2, 0), (1, 2, 1), (2, 2, 4), (3, 2, 4), (5, 2, 8), (17, 2, 18),
        (31, 32, 128), (33, 32, 128), (100, 32, 128 + 32), (129, 32, 192), (1000, 32, 1280),
        (2049, 32, 2080), (4001, 32, 4096), (9000, 32, 9408),
    ],
)  # fmt: skip
def test_fallback_values(value, base, wanted):
    assert coarse(value, base) == wanted


def test_fallback_is_exact_at_cubes():
    for root in range(2, 401):
        assert coarse(root**3, 1) == root**3
        assert coarse(root**3 + 1, 1) % (root + 1) == 0


def test_look_up_examples():
    decode = BucketTable(plan_buckets(DECODE, EXP_4096, EXP), EXP_4096)
    assert decode.find(1, 1, 100) == (4, 1, 128)
    assert decode.find(3, 1, 40) == (4, 1, 64)
    assert decode.find(33, 1, 200) == (36, 1, 256)
    prompt = BucketTable(plan_buckets(PROMPT, EXP_4096, EXP), EXP_4096)
    assert prompt.find(1, 129, 3) == (1, 256, 4)
    for shape, wanted in (((5, 300, 1), (8, 448, 1)), ((3, 700, 0), (4, 864, 0))):
        assert prompt.find(*shape) is None
        assert prompt.fallback(PROMPT, *shape) == wanted


def test_look_up_is_not_lexicographic():
    table = BucketTable([Bucket(1, 2048, 31), Bucket(2, 128, 0)], EXP_4096)
    assert table.find(1, 100, 0) == (2, 128, 0)
    table = BucketTable([Bucket(4, 128, 0), Bucket(1, 128, 1)], EXP_4096)
    assert table.find(1, 100, 0) == (1, 128, 1)


shapes = st.tuples(st.integers(1, 20), st.integers(1, 2048), st.integers(0, 32))


@given(shapes, st.sampled_from(BucketStrategy))
def test_look_up_pads_least_of_all_that_hold(shape, strategy):
    buckets = plan_buckets(PROMPT, EXP_4096, strategy)
    found = BucketTable(buckets, EXP_4096).find(*shape)
    holding = [b for b in buckets if all(has >= asked for has, asked in zip(b, shape, strict=True))]
    assert (found is None) == (not holding)
    if found:
        assert found in holding
        volumes = [b.batch * b.query * (b.context + 1) for b in holding]
        assert found.batch * found.query * (found.context + 1) == min(volumes)


@pytest.mark.parametrize("shape", [(65, 1, 100), (1, 2049, 0), (1, 128, 33)])
def test_a_batch_beyond_the_limits_is_an_error_not_a_smaller_bucket(shape):
    phase = DECODE if shape[1] == 1 else PROMPT
    with pytest.raises(BeyondLimits, match="the limits allow"):
        BucketTable((), EXP_4096).fallback(phase, *shape)


def test_decode_context_is_never_clamped_below_what_is_asked():
    limits = replace(EXP_4096, total_blocks=500)
    table = BucketTable([Bucket(4, 1, 128)], limits)
    assert table.fallback(DECODE, 3, 1, 120).context == 128
    assert table.fallback(DECODE, 8, 1, 200).context >= 200


def test_the_fallback_reaches_as_far_as_the_limits_do():
    shared = replace(EXP_4096, total_blocks=500)
    assert BucketTable((), shared).fallback(DECODE, 64, 1, 1500).context == 1500
    for limits, context in (
        (shared, 1501),
        (replace(shared, contiguous=True), 501),
        (replace(shared, clamped=False), 64 * 32 + 1),
    ):
        with pytest.raises(BeyondLimits):
            BucketTable((), limits).fallback(DECODE, 64, 1, context)
    merged = BucketTable((), replace(EXP_4096, merged_prefill=True))
    assert merged.fallback(PROMPT, 1, 2048, 16 * 31) == (1, 2048, 16 * 32)


def test_a_measured_cost_chooses_the_bucket():
    buckets = [Bucket(1, 128, 31), Bucket(1, 2048, 0)]
    assert BucketTable(buckets, EXP_4096).find(1, 128, 0) == (1, 2048, 0)  # the smaller volume
    table = BucketTable(buckets, EXP_4096, cost=lambda bucket: bucket.batch * bucket.query)
    assert table.find(1, 128, 0) == (1, 128, 31)
