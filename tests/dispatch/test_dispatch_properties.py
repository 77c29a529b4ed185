"""The dispatcher against a slow oracle that checks every entry for every batch."""

import sys
from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from piecegraph.dispatch import (
    Axis,
    Batch,
    Dispatcher,
    GraphMode,
    PaddingLimit,
    RuntimeMode,
    make_plan,
)
from piecegraph.errors import NoModeLeft

AXES = (Axis("ubatches", (1, 2)), Axis("chunks", (0, 4, 16), rounds_up=True))
ROUNDED_UP = {"chunks"}

limits = st.builds(
    PaddingLimit,
    factor=st.none() | st.floats(1, 3),
    tokens=st.none() | st.integers(0, 20),
)
plans = st.builds(
    make_plan,
    st.sampled_from(GraphMode),
    st.sets(st.integers(1, 40), min_size=1, max_size=4).map(sorted),
    max_num_reqs=st.integers(1, 16),
    query_lens=st.sets(st.integers(1, 5), min_size=1, max_size=2).map(sorted),
    varlen_decode=st.booleans(),
    lora_cases=st.sets(st.integers(0, 4), min_size=1, max_size=3).map(sorted),
    axes=st.sampled_from(((), AXES[:1], AXES)),
    padding=limits,
)
mode_sets = st.none() | st.sets(st.sampled_from(RuntimeMode))


def exact_batch(plan, graph_index):
    """A batch that fills the graph of `graph_index` exactly."""
    key = plan.entries[graph_index].descriptor
    return Batch(
        num_tokens=key.num_tokens,
        num_reqs=key.num_reqs or min(key.num_tokens, plan.max_num_reqs),
        is_decode=key.for_decode,
        query_len=key.uniform_query_len,
        num_loras=key.lora_case,
        max_query_len=key.max_query_len,
        axes=dict(key.axes),
    )


@st.composite
def batches(draw, plan):
    """Arbitrary batches, and batches that almost fill one graph of the plan."""
    if plan.entries and draw(st.booleans()):
        near = exact_batch(plan, draw(st.integers(0, len(plan.entries) - 1)))
        fewer = draw(st.integers(0, near.num_reqs - 1))
        left = near.num_reqs - fewer
        tokens = near.num_tokens - fewer * (near.query_len or 1)
        tokens = min(tokens, left * (near.max_query_len or tokens))
        loras = draw(st.integers(0, near.num_loras))
        return replace(near, num_tokens=tokens, num_reqs=left, num_loras=loras)
    is_decode = draw(st.booleans())
    query_len = draw(st.none() | st.integers(1, 6))
    if query_len:
        num_reqs = draw(st.integers(1, 20))
        num_tokens = num_reqs * query_len
    else:
        num_tokens = draw(st.integers(1, 45))
        num_reqs = draw(st.integers(1, num_tokens))
    bounds = st.integers(-(-num_tokens // num_reqs), 6 + num_tokens)
    return Batch(
        num_tokens,
        num_reqs,
        is_decode,
        query_len,
        num_loras=draw(st.integers(0, 5)),
        cascade=draw(st.booleans()),
        max_query_len=draw(st.none() | bounds),
        axes={axis.name: draw(st.integers(0, 5)) for axis in plan.axes} or None,
    )


def fits(plan, entry, batch):
    """Whether the graph may serve the batch, as simply as possible."""
    key = entry.descriptor
    uniform = batch.query_len if batch.is_decode else None
    bound = (uniform or batch.max_query_len or sys.maxsize) if batch.is_decode else sys.maxsize
    real = batch.axes or {}
    factor = plan.padding.factor or sys.maxsize
    spare = sys.maxsize if plan.padding.tokens is None else plan.padding.tokens
    return (
        key.num_tokens >= batch.num_tokens
        and key.num_tokens <= factor * batch.num_tokens
        and key.num_tokens - batch.num_tokens <= spare
        and (key.num_reqs is None or key.num_reqs >= batch.num_reqs)
        and (key.uniform_query_len is None or key.uniform_query_len == uniform)
        and (key.max_query_len is None or bound <= key.max_query_len)
        and key.lora_case >= batch.num_loras
        and not (batch.cascade and entry.mode is RuntimeMode.FULL)
        and all(
            value >= real[name] if name in ROUNDED_UP else value == real[name]
            for name, value in key.axes
        )
    )


@given(st.data())
def test_dispatch_takes_the_most_preferred_captured_graph_that_fits(data):
    plan = data.draw(plans)
    indices = range(len(plan.entries))
    some = st.sets(st.sampled_from(indices)) if indices else st.just(set())
    captured = data.draw(st.just(set(indices)) | some)
    it, other_rank = Dispatcher(plan, captured=captured), Dispatcher(plan)
    for graph_index in captured:
        other_rank.set_captured(graph_index, True)

    for _ in range(5):
        batch = data.draw(batches(plan))
        allowed, excluded = data.draw(mode_sets), data.draw(mode_sets)
        usable = (set(RuntimeMode) if allowed is None else allowed) - (excluded or set())

        def cost(graph_index, batch=batch):
            if graph_index < 0:
                return (0, batch.num_tokens)
            entry = plan.entries[graph_index]
            return (-entry.mode, entry.descriptor.num_tokens)

        able = [
            graph_index
            for graph_index in sorted(captured)
            if plan.entries[graph_index].mode in usable
            and fits(plan, plan.entries[graph_index], batch)
        ]
        able += [-1] if RuntimeMode.NONE in usable else []
        if not able:
            with pytest.raises(NoModeLeft):
                it.dispatch(batch, allowed, excluded)
            continue
        decision = it.dispatch(batch, allowed, excluded)
        event(f"{decision.mode.name}, {decision.reason}")
        assert decision.graph_index in able
        assert cost(decision.graph_index) == min(map(cost, able))
        assert other_rank.dispatch(batch, allowed, excluded) == decision
        assert it.dispatch(batch, allowed, excluded) is decision or decision.graph_index < 0
        # the path for rare facts answers as the common path does
        everything = list(RuntimeMode)
        assert allowed or excluded or it.dispatch(batch, everything) == decision
        if decision.graph_index < 0:
            assert decision.descriptor.num_tokens == batch.num_tokens
            assert decision.reason is decision.missed
        else:
            assert plan.entries[decision.graph_index].descriptor is decision.descriptor
            assert (decision.missed is None) == (
                decision.mode is RuntimeMode.FULL
                or not any(entry.mode is RuntimeMode.FULL for entry in plan.entries)
            )
        for candidate in it.explain(batch, allowed, excluded):
            if candidate.chosen:
                assert candidate.graph_index == decision.graph_index
            if candidate.obstacle is None:
                assert candidate.graph_index in able
                assert cost(candidate.graph_index) >= cost(decision.graph_index)


@given(plans)
def test_failure_2_every_registered_key_is_reachable_at_its_own_shape(plan):
    it = Dispatcher(replace(plan, padding=PaddingLimit()), captured=range(len(plan.entries)))
    strict = Dispatcher(plan, captured=range(len(plan.entries)))
    for graph_index, entry in enumerate(plan.entries):
        batch = exact_batch(plan, graph_index)
        assert it.dispatch(batch, allowed_modes=[entry.mode]).graph_index == graph_index
        assert it.dispatch(batch).graph_index == graph_index
        assert strict.dispatch(batch).graph_index == graph_index
