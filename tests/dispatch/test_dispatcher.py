"""The dispatcher: worked examples, and each reason."""

import numpy
import pytest
import torch

from piecegraph.dispatch import (
    NO_GRAPH,
    Axis,
    Batch,
    BatchDescriptor,
    Dispatcher,
    DispatchPlan,
    GraphMode,
    LoraGraphs,
    PaddingLimit,
    PlanEntry,
    Reason,
    RuntimeMode,
    default_capture_sizes,
    lora_cases,
    make_plan,
)
from piecegraph.errors import (
    BatchInvalid,
    DecisionNotPossible,
    InvalidSetting,
    NoModeLeft,
    PlanInvalid,
)

NONE, PIECEWISE, FULL = RuntimeMode


def dispatcher(mode, sizes, max_num_reqs=8, **options):
    plan = make_plan(GraphMode(mode), sizes, max_num_reqs=max_num_reqs, **options)
    return Dispatcher(plan, captured=range(len(plan.entries)))


def index_of(it, mode, num_tokens):
    entries = it.plan.entries
    return [(e.mode, e.descriptor.num_tokens) for e in entries].index((mode, num_tokens))


RELAXED_8 = BatchDescriptor(8)
MIXED_8 = BatchDescriptor(8, 8)
DECODE_8 = BatchDescriptor(8, 8, uniform_query_len=1)


def test_vectors_of_lora_counts():
    cases = lora_cases(4, LoraGraphs.BY_COUNT)
    assert cases == (0, 1, 2, 4, 5)
    assert lora_cases(4) == (0, 5)
    it = dispatcher("PIECEWISE", [1, 8], lora_cases=cases)
    assert len(it.plan.entries) == 10
    taken = {active: it.dispatch(Batch(8, 8, num_loras=active)).descriptor for active in (0, 3, 5)}
    assert {active: key.lora_case for active, key in taken.items()} == {0: 0, 3: 4, 5: 5}


def test_failure_3_a_full_graph_is_taken_where_a_piecewise_one_is_smaller():
    it = dispatcher("FULL_AND_PIECEWISE", [1, 2, 4, 8, 16, 24], query_lens=[3])
    assert it.dispatch(Batch(15, 5, True, 3)).descriptor.num_tokens == 18
    assert it.dispatch(Batch(15, 5, True, 3), excluded_modes=[FULL]).descriptor.num_tokens == 16


def test_decode_keys_end_at_the_largest_size_and_at_the_most_requests():
    def decode_keys(sizes, max_num_reqs):
        plan = dispatcher("FULL_DECODE_ONLY", sizes, max_num_reqs, query_lens=[3]).plan
        return [(e.descriptor.num_tokens, e.descriptor.num_reqs) for e in plan.entries]

    assert decode_keys([1, 8], 8) == [(3, 1)]
    assert decode_keys([3, 9, 12], 3) == [(9, 3), (3, 1)]


def test_capture_order_is_piecewise_first_and_largest_first():
    plan = dispatcher("FULL_AND_PIECEWISE", [1, 4, 8], lora_cases=(0, 3)).plan
    order = [(e.mode, -e.descriptor.num_tokens, e.descriptor.lora_case) for e in plan.entries]
    assert order == sorted(order)


def test_failure_1_a_prefill_chunk_of_decode_shape_is_no_decode():
    it = dispatcher("FULL_AND_PIECEWISE", [3, 24], query_lens=[3])
    assert it.dispatch(Batch(24, 8, False, 3)).mode is PIECEWISE
    assert it.dispatch(Batch(24, 8, True, 3)).mode is FULL


@pytest.mark.parametrize(
    ("query_lens", "max_num_reqs", "sizes"),
    [
        ((1, 2, 3, 4), 8, (1, 2, 4, 8, 16, 24)),
        ((1, 2, 3, 4), 128, default_capture_sizes(128, 8192, query_len=4)),
        ((1, 3, 5), 64, default_capture_sizes(64, 8192, query_len=5)),
        ((3, 17), 128, default_capture_sizes(128, 8192, query_len=17)),
    ],
)
def test_failure_W16_no_captured_full_graph_that_fits_is_missed(query_lens, max_num_reqs, sizes):
    it = dispatcher("FULL_AND_PIECEWISE", sizes, max_num_reqs, query_lens=query_lens)
    for query_len in query_lens:
        full = [
            e.descriptor for e in it.plan.entries if e.descriptor.uniform_query_len == query_len
        ]
        for reqs in range(1, max_num_reqs + 1):
            fitting = [key.num_tokens for key in full if key.num_reqs >= reqs]
            decision = it.dispatch(Batch(reqs * query_len, reqs, True, query_len))
            assert (decision.mode is FULL) == bool(fitting)
            assert not fitting or decision.descriptor.num_tokens == min(fitting)


def test_failure_W16_three_requests_of_one_token():
    it = dispatcher("FULL_AND_PIECEWISE", (1, 2, 4, 8, 16, 24), query_lens=(1, 2, 3, 4))
    assert it.dispatch(Batch(3, 3, True, 1)).descriptor == BatchDescriptor(4, 4, 1)


def test_failure_W28_sets_of_the_caller_stay_and_an_empty_one_is_empty():
    it = dispatcher("FULL", [8])
    allowed, excluded = {FULL, NONE}, {FULL}
    it.dispatch(Batch(8, 8), allowed, excluded)
    assert (allowed, excluded) == ({FULL, NONE}, {FULL})
    with pytest.raises(NoModeLeft, match="allowed are \\[\\]"):
        it.dispatch(Batch(8, 8), allowed_modes=set())


def test_failure_W13_a_batch_without_adapters_uses_the_one_case_there_is():
    cases = lora_cases(4, LoraGraphs.ONE)
    assert cases == (5,)
    it = dispatcher("PIECEWISE", [8], lora_cases=cases)
    assert it.dispatch(Batch(8, 8)).descriptor.lora_case == 5


def test_the_smallest_case_with_room_is_taken_in_whatever_order_they_were_given():
    it = dispatcher("PIECEWISE", [8], lora_cases=(5, 0, 2))
    taken = [it.dispatch(Batch(8, 8, num_loras=active)).descriptor.lora_case for active in range(6)]
    assert taken == [0, 2, 2, 5, 5, 5]


def test_of_two_equal_graphs_the_one_for_decode_alone_serves_decode():
    entries = tuple(PlanEntry(FULL, key) for key in (MIXED_8, DECODE_8))
    plan = DispatchPlan(entries, max_num_reqs=8)
    it = Dispatcher(plan, captured=[0, 1])
    assert it.dispatch(Batch(8, 8, True, 1)).graph_index == 1
    assert it.dispatch(Batch(8, 8, False)).graph_index == 0


@pytest.mark.parametrize(
    ("entries", "axes"),
    [
        ([PlanEntry(NONE, RELAXED_8)], ()),
        ([PlanEntry(PIECEWISE, BatchDescriptor(0))], ()),
        ([PlanEntry(FULL, MIXED_8)] * 2, ()),
        ([PlanEntry(FULL, MIXED_8)], (Axis("a", (1,)),)),
        ([], (Axis("a", (1,)), Axis("a", (2,)))),
    ],
)
def test_a_plan_that_cannot_be_is_an_error(entries, axes):
    with pytest.raises(PlanInvalid):
        DispatchPlan(tuple(entries), 8, axes)


def test_failure_6_adapters_without_a_case_run_without_a_graph():
    it = dispatcher("FULL", [8], lora_cases=(0, 2))
    decision = it.dispatch(Batch(8, 8, num_loras=3))
    assert (decision.mode, decision.reason) == (NONE, Reason.LORA_CASE_MISSING)


def test_reasons_of_a_graph():
    it = dispatcher("FULL_AND_PIECEWISE", [4, 8])
    assert it.dispatch(Batch(8, 8, True, 1)).reason is Reason.EXACT
    assert it.dispatch(Batch(7, 7, True, 1)).reason is Reason.PADDED
    relaxed = it.dispatch(Batch(8, 4, True, 2))
    assert (relaxed.mode, relaxed.reason) == (PIECEWISE, Reason.RELAXED)
    assert relaxed.missed is Reason.CAPABILITY


def test_reasons_for_no_better_mode():
    it = dispatcher("FULL_AND_PIECEWISE", [4, 8], padding=PaddingLimit(factor=2.0))
    decode = Batch(8, 8, True, 1)
    assert it.dispatch(decode).missed is None
    assert it.dispatch(Batch(8, 8, True, 1, cascade=True)).missed is Reason.CASCADE
    assert it.dispatch(decode, excluded_modes=[FULL]).missed is Reason.EXCLUDED
    assert it.dispatch(Batch(9, 8)).reason is Reason.ABOVE_LARGEST_SIZE
    assert it.dispatch(Batch(1, 1, True, 1)).reason is Reason.PADDING_LIMIT
    assert it.dispatch(Batch(0, 0)).reason is Reason.NO_TOKENS
    it.set_captured(index_of(it, FULL, 8), False)
    assert it.dispatch(decode).missed is Reason.NOT_CAPTURED


def test_none_excluded_and_nothing_fits_is_an_error():
    it = dispatcher("FULL", [8])
    with pytest.raises(NoModeLeft, match="above largest size"):
        it.dispatch(Batch(9, 8), excluded_modes={NONE})


def test_more_requests_than_a_graph_has_room_for():
    keys = (BatchDescriptor(16, 8), BatchDescriptor(4, 2))
    plan = DispatchPlan(tuple(PlanEntry(FULL, key) for key in keys), max_num_reqs=8)
    it = Dispatcher(plan, captured=(0, 1))
    for decode in (False, True):
        assert it.dispatch(Batch(4, 2, decode, 2)).descriptor == BatchDescriptor(4, 2)
        assert it.dispatch(Batch(4, 4, decode, 1)).descriptor == BatchDescriptor(16, 8)
        assert it.dispatch(Batch(9, 9, decode, 1)).reason is Reason.TOO_MANY_REQS


@pytest.mark.parametrize("limit", [{"factor": 0.9}, {"tokens": -1}])
def test_a_padding_limit_that_nothing_keeps_is_an_error(limit):
    with pytest.raises(InvalidSetting, match="padding_limit"):
        PaddingLimit(**limit)


def test_ascend_15347_a_rank_without_requests_can_follow_any_captured_graph():
    it = dispatcher("FULL_AND_PIECEWISE", [4, 8])
    for graph_index in range(len(it.plan.entries)):
        assert it.follow(graph_index, Batch(0, 0)).graph_index == graph_index
    it.set_captured(1, False)
    with pytest.raises(DecisionNotPossible):
        it.follow(1, Batch(0, 0))


def test_sizes_above_the_end_of_mixed_batches_serve_decode_only():
    plan = make_plan(GraphMode.FULL_AND_PIECEWISE, [512, 1024], max_num_reqs=1024, mixed_end=512)
    it = Dispatcher(plan, captured=range(len(plan.entries)))
    assert it.dispatch(Batch(520, 3)).mode is NONE
    assert it.dispatch(Batch(1000, 1000, is_decode=True, query_len=1)).mode is FULL


def test_failure_5_what_reaches_a_launch_can_be_an_axis_of_the_key():
    axes = [Axis("num_ubatches", (1, 2)), Axis("prefix_chunks", (0, 4), rounds_up=True)]
    it = dispatcher("FULL", [8], axes=axes)

    def answer(**values):
        return it.dispatch(Batch(8, 8, axes=values))

    assert answer(prefix_chunks=3, num_ubatches=2).descriptor.axes == (
        ("num_ubatches", 2),
        ("prefix_chunks", 4),
    )
    assert answer(num_ubatches=1, prefix_chunks=0).descriptor.axes[1] == ("prefix_chunks", 0)
    assert answer(num_ubatches=3, prefix_chunks=0).reason is Reason.AXIS
    assert answer(num_ubatches=1, prefix_chunks=5).reason is Reason.AXIS


@pytest.mark.parametrize("axes", [None, {}, {"other": 1}, {"a": 1, "b": 1}])
def test_a_batch_must_have_just_the_axes_of_the_plan(axes):
    it = dispatcher("FULL", [8], axes=[Axis("a", (1,))])
    with pytest.raises(BatchInvalid, match="axes of the plan are \\['a'\\]"):
        it.dispatch(Batch(8, 8, axes=axes))
    without = dispatcher("FULL", [8])
    without.dispatch(Batch(8, 8))  # what follows could be found directly
    with pytest.raises(BatchInvalid):
        without.dispatch(Batch(8, 8, axes={"a": 1}))


@pytest.mark.parametrize("facts", [(-1, 1), (1, -1)])
def test_negative_counts_are_errors(facts):
    it = dispatcher("PIECEWISE", [8])
    it.dispatch(Batch(1, 1))
    assert it.dispatch(Batch(8, 8)) is it.dispatch(Batch(8, 8))  # the last of the hot row
    with pytest.raises(BatchInvalid, match="negative"):
        it.dispatch(Batch(*facts))


@pytest.mark.parametrize(
    ("batch", "valid"),
    [
        (Batch(5, 2, is_decode=True, query_len=1), Batch(5, 5, is_decode=True, query_len=1)),
        (Batch(5, 2, is_decode=True, query_len=2), Batch(4, 2, is_decode=True, query_len=2)),
        (Batch(5, 2, is_decode=True, query_len=3), Batch(6, 2, is_decode=True, query_len=3)),
        (
            Batch(9, 4, is_decode=True, max_query_len=2),
            Batch(8, 4, is_decode=True, max_query_len=2),
        ),
        (Batch(5, 2, query_len=2), Batch(4, 2, query_len=2)),
        (Batch(5, 2, max_query_len=2), Batch(5, 3, max_query_len=2)),
        (Batch(2, 5), Batch(2, 2)),
        (Batch(20, 21), Batch(20, 20)),
    ],
)
def test_a_batch_that_contradicts_itself_is_an_error_also_where_the_row_is_hot(batch, valid):
    it = dispatcher("FULL_AND_PIECEWISE", [4, 8, 16], query_lens=[1, 2])
    for _ in range(2):
        it.dispatch(valid)
        for ask in (it.dispatch, it.wanted, it.explain):
            with pytest.raises(BatchInvalid, match=f"{batch.num_reqs} requests"):
                ask(batch)


@pytest.mark.parametrize("is_decode", [False, True])
def test_a_query_len_above_its_bound_is_an_error(is_decode):
    it = dispatcher("FULL_AND_PIECEWISE", [4, 8, 16], query_lens=[1, 2])
    with pytest.raises(BatchInvalid, match="query_len is 3, but max_query_len is 1"):
        it.dispatch(Batch(3, 1, is_decode, query_len=3, max_query_len=1))


def test_wanted_does_not_wait_for_the_capture():
    plan = make_plan(GraphMode.FULL_AND_PIECEWISE, [4, 8], max_num_reqs=8)
    it = Dispatcher(plan)
    batch = Batch(3, 3, True, 1)
    assert it.dispatch(batch).reason is Reason.NOT_CAPTURED
    wanted = it.wanted(batch)
    assert wanted.descriptor == BatchDescriptor(4, 4, 1)
    larger = index_of(it, FULL, 8)
    it.set_captured(larger, True)
    assert it.dispatch(batch).graph_index == larger
    it.set_captured(wanted.graph_index, True)
    assert it.dispatch(batch) == wanted
    it.set_captured(wanted.graph_index, False)
    assert it.dispatch(batch).graph_index == larger


@pytest.mark.slow
def test_hot_rows_are_found_again_after_many_batch_classes(monkeypatch):
    it = dispatcher("FULL_AND_PIECEWISE", [4, 8], lora_cases=range(512))
    it.dispatch(Batch(3, 3))
    for num_loras in range(512):
        it.dispatch(Batch(3, 3, num_loras=num_loras))
    first = it.dispatch(Batch(5, 5))
    monkeypatch.setattr(it, "_live", None)
    assert it.dispatch(Batch(5, 5)) is first


def test_a_rank_decision_is_followed_or_refused():
    it = dispatcher("FULL_AND_PIECEWISE", [4, 8])
    batch = Batch(3, 3, True, 1)
    graph_index = index_of(it, PIECEWISE, 8)
    decision = it.follow(graph_index, batch)
    assert (decision.graph_index, decision.reason) == (graph_index, Reason.RANK_DECISION)
    none = it.follow(NO_GRAPH, batch)
    assert (none.mode, none.descriptor) == (NONE, BatchDescriptor(3))
    with pytest.raises(DecisionNotPossible, match="above largest size"):
        dispatcher("FULL_AND_PIECEWISE", [4, 8]).follow(graph_index, Batch(9, 9, True, 1))
    it.set_captured(graph_index, False)
    with pytest.raises(DecisionNotPossible, match="not captured yet"):
        it.follow(graph_index, batch)
    with pytest.raises(DecisionNotPossible, match="no such graph"):
        it.follow(99, batch)


def test_explain_names_what_keeps_the_batch_from_each_entry():
    it = dispatcher("FULL_AND_PIECEWISE", [2, 4, 8])
    batch = Batch(3, 3, True, 1)
    listed = it.explain(batch)
    assert {each.graph_index for each in listed} == set(range(6))
    [taken] = [each for each in listed if each.chosen]
    assert taken.graph_index == it.dispatch(batch).graph_index
    small = [each.obstacle for each in listed if each.entry.descriptor.num_tokens == 2]
    assert small == [Reason.ABOVE_LARGEST_SIZE] * 2
    assert [each.obstacle for each in listed if each.entry.descriptor.num_tokens == 8] == [
        None,
        None,
    ]


def test_digests_agree_just_where_decisions_do():
    def digest(**options):
        return make_plan(GraphMode.FULL, [4, 8], max_num_reqs=8, **options).digest

    assert digest() == digest()
    assert len(digest()) == 64
    others = [
        digest(padding=PaddingLimit(factor=2)),
        digest(lora_cases=(0, 2)),
        digest(axes=[Axis("a", (1,))]),
        digest(axes=[Axis("a", (1,), rounds_up=True)]),
        make_plan(GraphMode.PIECEWISE, [4, 8], max_num_reqs=8).digest,
        make_plan(GraphMode.FULL, [4, 8], max_num_reqs=7).digest,
    ]
    assert len({digest(), *others}) == len(others) + 1


def test_a_repeated_batch_is_answered_without_classifying_it(monkeypatch):
    it = dispatcher("FULL_AND_PIECEWISE", [1, 2, 4, 8])
    batches = [Batch(3, 3, is_decode=True, query_len=1), Batch(5, 2), Batch(900, 2)]
    before = [it.dispatch(batch) for batch in batches]
    monkeypatch.setattr("piecegraph.dispatch.dispatcher.classify", None)
    assert [it.dispatch(batch) for batch in batches] == before


def test_the_tables_of_rare_batches_are_bounded():
    it = dispatcher("PIECEWISE", [8], lora_cases=(10_000,))
    for active in range(3000):
        assert it.dispatch(Batch(8, 8, num_loras=active)).graph_index == 0
    assert len(it._live.by_class) <= 256
    for num_tokens in range(9, 3000):
        assert it.dispatch(Batch(num_tokens, 8)).descriptor.num_tokens == num_tokens
    assert max(len(table.decisions) for table in it._live.by_class.values()) <= 8 + 1 + 256


def replaced(**facts):
    """A batch to which an engine sets facts after it was made."""
    batch = Batch(4, 4, is_decode=True, query_len=1)
    for name, value in facts.items():
        setattr(batch, name, value)
    return batch


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        (None, "NoneType"),
        ((4, 4), "tuple"),
        (lambda: Batch("4", 4), "num_tokens"),
        (lambda: Batch(torch.tensor(4), torch.tensor(4)), "num_tokens"),
        (lambda: Batch(4.0, 4), "num_tokens"),
        (lambda: Batch(None, 4), "num_tokens"),
        (lambda: Batch(4, None), "num_reqs"),
        (Batch(4, 4, num_loras="a"), "num_loras"),
        (Batch(4, 4, is_decode=True, query_len="1"), "query_len"),
        (Batch(4, 2, is_decode=True, max_query_len=2.5), "max_query_len"),
        (Batch(4, 4, is_decode="no", query_len=1), "is_decode"),
        (Batch(4, 4, cascade="no"), "cascade"),
        (lambda: Batch(4, 4, is_decode=torch.tensor([True, False])), "is_decode is tensor"),
        (lambda: Batch(4, 4, is_decode=torch.tensor(True)), "is_decode is tensor"),
        (lambda: Batch(4, 4, cascade=numpy.array([True])), "cascade is array"),
        (lambda: Batch(4, 4, num_loras=numpy.array([1, 0])), "num_loras is array"),
        (lambda: replaced(num_reqs=torch.tensor([1, 0])), "num_reqs is tensor"),
        (Batch(4, 4, axes=["a"]), "axes"),
        (Batch(3, 0), "num_reqs is 0"),
        (Batch(6, 2, is_decode=True, query_len=3, max_query_len=1), "max_query_len is 1"),
    ],
)
def test_a_fact_of_the_wrong_type_is_refused_by_name(batch, field):
    it = dispatcher("FULL_AND_PIECEWISE", [2, 4, 8], query_lens=(1, 3))
    for valid in (Batch(4, 4, True, 1), Batch(6, 2, True, 3)):
        it.dispatch(valid)  # the tables exist now
    with pytest.raises(BatchInvalid, match=field):
        it.dispatch(batch() if callable(batch) else batch)


@pytest.mark.parametrize("modes", ["FULL", ["FULL"], FULL, 5])
def test_modes_that_are_no_collection_of_modes_are_refused(modes):
    it = dispatcher("FULL", [4])
    with pytest.raises(InvalidSetting, match="excluded_modes"):
        it.dispatch(Batch(4, 4), excluded_modes=modes)
