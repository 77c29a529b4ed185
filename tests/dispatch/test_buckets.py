"""Buckets against the tables of vLLM on Gaudi: ranges, plans, files, look-up, fall-back."""

from dataclasses import replace
from itertools import count, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.dispatch import (
    NO_GRAPH,
    Batch,
    Bucket,
    BucketLimits,
    BucketMemory,
    BucketStrategy,
    BucketTable,
    Dispatcher,
    Phase,
    bucket_plan,
    filter_buckets,
    plan_buckets,
    read_buckets,
    setting_for,
)
from piecegraph.dispatch.buckets.lookup import rounded_up
from piecegraph.dispatch.buckets.ranges import (
    BucketRange,
    bucket_ranges,
    range_values,
)
from piecegraph.errors import BeyondLimits, BucketFileInvalid, InvalidSetting, NoBuckets
from tests.tables import tables_of

EXP, LIN, PAD = BucketStrategy.EXPONENTIAL, BucketStrategy.LINEAR, BucketStrategy.PADDING_AWARE
PROMPT, DECODE = Phase.PROMPT, Phase.DECODE
TABLES = tables_of(__file__)
EXP_4096 = BucketLimits(128, 2048, 4096, max_num_reqs=64, max_prefill_reqs=16)


def numbers(text):
    return [int(word) for word in text.split()]


@pytest.mark.parametrize(("strategy", "config", "values"), TABLES["values"])
def test_values_of_a_range(strategy, config, values):
    assert range_values("x", BucketStrategy[strategy], BucketRange(*config)) == values


@pytest.mark.parametrize(
    "config",
    [(5, 1, 4), (-1, 1, 4), (1, 0, 8), (1, 2, 8, 0), (1, 2, 8, 1, -1), (1, 2, 8, 1, 4, 51)],
)
def test_a_range_that_cannot_be_is_an_error(config):
    with pytest.raises(InvalidSetting, match="prompt.query"):
        range_values("prompt.query", PAD, BucketRange(*config))


CONTIGUOUS = {"contiguous": True, "total_blocks": 100}


@pytest.mark.parametrize(("phase", "strategy", "limits", "dimension", "config"), TABLES["defaults"])
def test_default_ranges_follow_from_the_limits(phase, strategy, limits, dimension, config):
    limits = replace(EXP_4096, **limits)
    got = bucket_ranges(Phase[phase], limits, BucketStrategy[strategy], {})[dimension]
    assert [got.min, got.step, got.max, got.limit, got.pad_max][: len(config)] == config
    assert got.pad_percent == 25


def test_parameters_replace_defaults_and_what_follows_from_them():
    own = {"prompt.query.min": 256, "prompt.query.max": 1024, "decode.batch.limit": 3}
    prompt = bucket_ranges(PROMPT, EXP_4096, PAD, own)
    assert prompt["query"] == BucketRange(256, 128, 1024, 10, 256)
    assert prompt["context"].max == (4096 - 256) // 128
    decode = plan_buckets(DECODE, EXP_4096, EXP, own)
    assert {bucket.batch for bucket in decode} == {1, 2, 12, 64}
    high = {"decode.context.max": 500, "decode.context.min": 300}
    context = bucket_ranges(DECODE, replace(EXP_4096, **CONTIGUOUS), EXP, high)["context"]
    assert (context.min, context.max) == (36, 100)
    with pytest.raises(InvalidSetting, match=r"did you mean prompt\.query\.max"):
        plan_buckets(DECODE, EXP_4096, EXP, {"prompt.query.maxi": 1})


def test_the_worked_example():
    prompt, decode = (plan_buckets(phase, EXP_4096, EXP) for phase in (PROMPT, DECODE))
    batches, queries = numbers("1 2 4 6 10 16"), numbers("128 256 384 512 768 896 1280 1664 2048")
    every = product(batches, queries, numbers("0 1 2 4 8 16 31"))
    assert prompt == tuple(sorted(each for each in every if each[0] * each[1] <= 2048))
    contexts = numbers("1 64 128 192 256 320 448 640 832 1152 1536 2048")
    every = product(numbers("1 2 4 8 12 22 36 64"), (1,), contexts)
    assert decode == tuple(sorted({(b, q, min(c, b * 32)) for b, q, c in every if b <= c}))


def test_published_lists():
    """Two lists of a log. The first bounds the context by the query, as merged prompts do."""
    limits = BucketLimits(128, 1024, 1024, max_num_reqs=4, merged_prefill=True)
    own = {"query.step": 128, "query.limit": 11, "context.step": 1, "context.max": 7}
    own = {f"prompt.{name}": value for name, value in {**own, "context.limit": 11}.items()}
    expected = [(1, 128 * n, context) for n in range(1, 9) for context in range(9 - n)]
    assert list(plan_buckets(PROMPT, limits, EXP, own)) == expected
    assert len(expected) == 36
    # its decode contexts are from a version that gave equal values the next free multiples
    text = "([1, 2, 4], 1, [*, 1408, 1792, 2432, 3328, 4352, 5888])"
    file = text.replace("*", ", ".join(map(str, range(128, 1025, 128))))
    long = BucketLimits(128, 2048, 1 << 20, max_num_reqs=4)
    assert len(filter_buckets(read_buckets(file), long)) == 42
    # requests and sequence length only
    flat = BucketLimits(1, 4096, 2048, max_num_reqs=4, max_prefill_reqs=4)
    own = {
        "prompt.batch.step": 32,
        "prompt.context.max": 0,
        "prompt.query.max": 1024,
        "prompt.query.min": 128,
        "prompt.query.step": 128,
        "decode.batch.step": 128,
        "decode.context.max": 2048,
        "decode.context.min": 128,
        "decode.context.step": 128,
    }
    prompt, decode = (plan_buckets(phase, flat, LIN, own) for phase in (PROMPT, DECODE))
    assert list(prompt) == [(b, q, 0) for b in (1, 2, 4) for q in range(128, 1025, 128)]
    assert list(decode) == [(b, 1, c) for b in (1, 2, 4) for c in range(128, 2049, 128)]
    assert (len(prompt), len(decode)) == (24, 48)


def test_filters_correctors_and_edges():
    contiguous = replace(EXP_4096, contiguous=True, total_blocks=1000)
    buckets = plan_buckets(DECODE, contiguous, LIN)
    assert Bucket(64, 1, 1) in buckets
    assert Bucket(1, 1, 1000) in buckets
    merged = replace(EXP_4096, merged_prefill=True)
    assert merged.keeps(Bucket(1, 2048, 16 * 31))
    assert not merged.keeps(Bucket(1, 2048, 16 * 31 + 1))
    sliced = replace(EXP_4096, slice_size=1024)
    kept = ((1, 8192, 0), (1, 8200, 0), (1, 8200, 1), (1, 8191, 0))
    assert [sliced.keeps(Bucket(*shape)) for shape in kept] == [True, False, True, True]
    assert not EXP_4096.keeps(Bucket(65, 1, 100))
    assert not replace(EXP_4096, max_num_tokens=32).keeps(Bucket(64, 1, 100))
    chunked = replace(EXP_4096, chunk_size=256)
    assert all(b.query % 256 == 0 for b in plan_buckets(PROMPT, chunked, EXP))
    with pytest.raises(InvalidSetting, match="chunk_size = 300"):
        plan_buckets(PROMPT, replace(EXP_4096, chunk_size=300))
    with pytest.raises(NoBuckets, match=r"\(1, 8, 0\)"):
        plan_buckets(PROMPT, BucketLimits(8, 8, 4, max_num_reqs=1))
    own = {"prompt.query.min": 1, "prompt.query.max": 64}
    assert all(b.phase is PROMPT for b in plan_buckets(PROMPT, EXP_4096, EXP, own))


@pytest.mark.parametrize(("own", "edges"), [({}, (127, 112)), ({"prompt.context.max": 5}, (5, 5))])
def test_the_edge_of_a_long_context_leaves_room_for_the_query(own, edges):
    limits = BucketLimits(128, 2048, 16384, max_num_reqs=8)
    largest = dict.fromkeys((128, 2048), 0)
    for _, query, context in plan_buckets(PROMPT, limits, EXP, own):
        if query in largest:
            largest[query] = max(largest[query], context)
    assert tuple(largest.values()) == edges


def test_the_grid_of_fall_backs():
    for value, base, expected in TABLES["rounded_up"]:
        assert rounded_up(value, base) == expected
    for root in range(2, 401):
        assert rounded_up(root**3, 1) == root**3
        assert rounded_up(root**3 + 1, 1) % (root + 1) == 0


def test_look_up_and_fall_back_of_the_worked_example():
    planned = [bucket for phase in Phase for bucket in plan_buckets(phase, EXP_4096)]
    table = BucketTable(planned, EXP_4096)
    for shape, expected in {
        (1, 1, 100): (4, 1, 128),
        (3, 1, 40): (4, 1, 64),
        (33, 1, 200): (36, 1, 256),
        (1, 129, 3): (1, 256, 4),
    }.items():
        assert table.pad(Bucket(*shape)) == expected
    for shape, rounded in {(5, 300, 1): (8, 448, 1), (3, 700, 0): (4, 864, 0)}.items():
        assert table.find(Bucket(*shape)) is None
        assert table.fallback(Bucket(*shape)) == rounded
        assert setting_for(Bucket(*shape), EXP_4096) == "max_num_tokens"
    assert not table.fallbacks
    assert table.pad(Bucket(3, 600, 0)) == (3, 600, 0)  # rounded up it has too many tokens
    assert table.pad(Bucket(5, 130, 32)) == table.pad(Bucket(5, 130, 32)) == (8, 192, 32)
    assert table.fallbacks == {(3, 600, 0): 1, (5, 130, 32): 2}
    assert setting_for(Bucket(5, 130, 32), EXP_4096) == "prompt.context.max"
    one = BucketLimits(128, 1024, 1024, max_num_reqs=4, merged_prefill=True)
    assert setting_for(Bucket(1, 1000, 1), one) == "max_model_len"


@pytest.mark.parametrize("shape", [(65, 1, 100), (1, 2049, 0), (1, 128, 33), (64, 1, 1501)])
def test_a_batch_beyond_the_limits_is_an_error_not_a_smaller_bucket(shape):
    table = BucketTable([Bucket(4, 1, 128)], replace(EXP_4096, total_blocks=500))
    assert table.fallback(Bucket(3, 1, 120)).context == 128
    assert table.fallback(Bucket(64, 1, 1500)).context == 1500
    with pytest.raises(BeyondLimits, match="the limits allow"):
        table.pad(Bucket(*shape))


shapes = st.builds(Bucket, st.integers(1, 20), st.integers(1, 2048), st.integers(0, 32))


@given(st.sets(shapes, max_size=20), shapes, st.none() | st.just(lambda b: b.batch * b.query))
def test_look_up_is_the_cheapest_of_all_that_hold(buckets, shape, cost):
    """Of its phase, whatever the order: the plugin takes the first one."""
    table = BucketTable(buckets, EXP_4096, *([cost] if cost else []))
    cost = cost or (lambda bucket: bucket.batch * bucket.query * (bucket.context + 1))
    holding = [
        b
        for b in buckets
        if (b.query == 1) == (shape.query == 1)
        and all(has >= asked for has, asked in zip(b, shape, strict=True))
    ]
    found = table.find(shape)
    assert found in holding if holding else found is None
    assert found is None or cost(found) == min(map(cost, holding))


def test_a_line_of_a_file_means_all_its_combinations():
    text = """
    # prompts
    (1, 128, 0)
    (range(1, 4), [128, 256], 0)   # six
    ([1, 2], 1, range(4, 0, -2))
    (1, 128, 0)
    """
    decode = [(1, 1, 2), (1, 1, 4), (2, 1, 2), (2, 1, 4)]
    prompt = [(b, q, 0) for b in (1, 2, 3) for q in (128, 256)]
    assert list(read_buckets(text)) == sorted([*decode, *prompt])


def test_every_bad_line_is_reported_at_once_with_its_place():
    lines, columns, reasons = zip(*TABLES["bad_lines"], strict=True)
    with pytest.raises(BucketFileInvalid) as caught:
        read_buckets("\n".join(["(1, 128, 0)", *lines]), source="b.txt")
    bad = {each.line: each for each in caught.value.facts["lines"]}
    assert sorted(bad) == [*range(2, len(lines) + 2)]
    for number, text, column, reason in zip(count(2), lines, columns, reasons, strict=False):
        assert reason in bad[number].reason, text
        assert bad[number].column == column, text
        assert f"b.txt:{number}:{column}: " in str(caught.value)


@given(st.text(max_size=40) | st.text("(1,2)[]range 0#-'\\x", max_size=40))
def test_no_text_crashes_the_reader(text):
    try:
        buckets = read_buckets(text)
    except BucketFileInvalid:
        return
    assert all(isinstance(bucket, Bucket) and min(bucket) >= 0 for bucket in buckets)


def test_a_plan_has_one_full_graph_for_each_bucket():
    buckets = [Bucket(2, 8, 1), Bucket(4, 1, 6), Bucket(2, 8, 1), Bucket(1, 16, 0), Bucket(2, 1, 6)]
    plan = bucket_plan(buckets, 4, BucketMemory(prompt_share=0.4))
    keys = [
        (e.descriptor.num_tokens, e.descriptor.num_reqs, e.descriptor.axes) for e in plan.entries
    ]
    assert keys == [
        (16, 2, (("query", 8), ("context", 1))),
        (16, 1, (("query", 16), ("context", 0))),
        (4, 4, (("query", 1), ("context", 6))),
        (2, 2, (("query", 1), ("context", 6))),
    ]
    assert plan.entries[0].shape == "FULL 16: num_reqs 2, query 8, context 1"
    assert plan.as_json()["phases"] == [("prompt", 0.4, (0, 1)), ("decode", 0.6, (2, 3))]
    assert [each.order for each in plan.without_sizes_below(4).phases] == [(0, 1), (2,)]
    it = Dispatcher(plan, captured=range(4))
    assert it.dispatch(Batch(16, 2, axes={"query": 8, "context": 1})).graph_index == 0
    assert it.dispatch(Batch(16, 2, axes={"query": 8, "context": 0})).graph_index == NO_GRAPH


@pytest.mark.parametrize("wrong", [{"prompt_share": 1.5}, {"decode_order": "max_tokens"}])
def test_memory_of_buckets_is_checked(wrong):
    with pytest.raises(InvalidSetting, match=f"sizes.bucket_memory.{next(iter(wrong))}"):
        BucketMemory(**wrong)
