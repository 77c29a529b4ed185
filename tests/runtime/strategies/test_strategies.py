"""Each strategy step by step; every step's result is compared, with poison on."""

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph import Batch, GraphMode, RuntimeMode
from piecegraph.config import STRATEGIES
from piecegraph.dispatch import CaptureStrategy, make_plan
from piecegraph.errors import BatchInvalid, CaptureAfterSeal, InvalidArgument
from piecegraph.runtime.parts.strategies.counted import CountedCaptures
from piecegraph.runtime.parts.strategies.wanted import (
    FADE_STEPS,
    GIVE_UP_AFTER,
    RETRY_STEPS,
    CaptureQueue,
)

from .conftest import call_in_steps

EVERYTHING = ["PIECEWISE 8", "PIECEWISE 4", "PIECEWISE 2", "PIECEWISE 1"]
EVERYTHING += ["FULL 8", "FULL 4", "FULL 2", "FULL 1"]


def test_eager_captures_everything_piecewise_before_full_largest_first(make):
    served = make(strategy="eager").capture()
    assert served.captures == EVERYTHING
    assert served.decode(3) == "FULL 4"
    assert served.mixed(3) == "PIECEWISE 4"
    assert served.prepared.capture_idle(1e6) == 0
    assert served.captures == EVERYTHING


@pytest.mark.parametrize("strategy", ["delayed", "lazy"])
def test_at_startup_only_the_largest_of_each_mode(make, strategy):
    served = make(strategy=strategy).capture()
    assert served.captures == ["PIECEWISE 8", "FULL 8"]


def test_delayed_takes_the_current_size_first_then_the_next_largest(make):
    served = make(strategy="delayed").capture()
    for n in (1, 1, 8, 2, 8, 8):
        assert served.decode(n) == f"FULL {n}"
    assert served.captures[2:] == [
        "FULL 1", "PIECEWISE 4", "FULL 4", "FULL 2", "PIECEWISE 2", "PIECEWISE 1",
    ]  # fmt: skip


def test_delayed_is_sealed_when_everything_is_there(make):
    served = make(strategy={"kind": "delayed", "captures_per_step": 3}).capture()
    served.decode(8)
    served.prepared.capture()
    served.decode(8)
    assert sorted(served.captures) == sorted(EVERYTHING)
    assert served.prepared.events.named("capture.complete")
    with pytest.raises(CaptureAfterSeal):
        served.prepared.capture()


def test_lazy_takes_only_what_occurs_by_its_padded_size(make):
    served = make(strategy="lazy").capture()
    assert [served.decode(n) for n in (5, 3, 4, 3)] == ["FULL 8", "FULL 4", "FULL 4", "FULL 4"]
    assert [served.mixed(n) for n in (7, 4, 3)] == ["PIECEWISE 8", "PIECEWISE 4", "PIECEWISE 4"]
    assert served.captures[2:] == ["FULL 4", "PIECEWISE 4"]


@pytest.mark.parametrize("per_step", [1, 2, 5])
def test_the_budget_bounds_captures_per_step(make, per_step):
    served = make(strategy={"kind": "delayed", "captures_per_step": per_step}).capture()
    before = len(served.captures)
    served.decode(1)
    assert len(served.captures) - before == per_step


def test_idle_milliseconds_go_by_what_captures_took(make):
    moments = itertools.count(step=0.020)  # a capture is looked at twice, so it takes 20 ms
    served = make(strategy="delayed")
    served.prepared.parts.strategies.capturer.captures.captures.clock = lambda: next(moments)
    served.prepared.capture()
    assert served.prepared.capture_idle(19) == 0
    assert served.told("capture.refused")[0] == "PIECEWISE 4"
    assert served.captures[2:] == []
    assert served.prepared.capture_idle(59) == 2
    assert served.captures[2:] == ["PIECEWISE 4", "FULL 4"]
    assert [served.prepared.capture_idle(budget) for budget in (21, 1e6, 1e6)] == [1, 3, 0]
    assert sorted(served.captures) == sorted(EVERYTHING)


def test_a_capture_is_estimated_by_the_nearest_size_of_its_mode():
    plan = make_plan(GraphMode.FULL, (1, 5, 6, 100), max_num_reqs=100)
    captures = SimpleNamespace(plan=plan)
    counted = CountedCaptures(captures, CaptureQueue(CaptureStrategy.LAZY, plan))
    counted.ms[RuntimeMode.PIECEWISE] = {8: 99.0}
    assert counted.estimate(0) == 0
    counted.ms[RuntimeMode.FULL] = {4: 10.0, 8: 20.0}
    assert [counted.estimate(index) for index in range(4)] == [20, 20, 10, 10]


def test_an_eager_queue_has_nothing_between_steps():
    plan = make_plan(GraphMode.FULL, (1, 2), max_num_reqs=2)
    queues = {s: CaptureQueue(s, plan) for s in CaptureStrategy}
    assert {s: list(queue.between_steps(0)) for s, queue in queues.items()} == {
        CaptureStrategy.EAGER: [], CaptureStrategy.DELAYED: [0, 1], CaptureStrategy.LAZY: [0],
    }  # fmt: skip


def test_old_hits_fade():
    plan = make_plan(GraphMode.FULL, (1, 2), max_num_reqs=2)
    queue = CaptureQueue(CaptureStrategy.LAZY, plan)
    for _ in range(FADE_STEPS - 1):
        queue.see(0)
    assert queue.states[0].hits == FADE_STEPS - 1
    queue.see(-1)
    assert queue.states[0].hits == (FADE_STEPS - 1) // 2


def test_lazy_uses_idle_time_for_what_was_wanted_most_first(make):
    failing = {"failing_captures": {4, 5, 6}}  # the first capture of each size that is wanted
    served = make(strategy="lazy", options=failing).capture()
    for n in (1, 2, 2, 2, 4, 1):
        served.decode(n)
    assert served.prepared.parts.strategies.idle(1e6) == 0
    for _ in range(RETRY_STEPS):
        served.decode(8)
    assert served.prepared.parts.strategies.idle(1e6) == 3
    assert served.captures[2:] == ["FULL 2", "FULL 1", "FULL 4"]


def test_a_failed_capture_is_remembered_and_not_retried_at_once(make):
    # graphs: PIECEWISE 8 takes two, FULL 8 one; the fourth is FULL 2
    served = make(strategy="lazy", options={"failing_captures": frozenset({4})}).capture()
    steps = [served.decode(2) for _ in range(RETRY_STEPS + 1)]
    assert steps[:-1] == ["FULL 8"] * RETRY_STEPS
    assert steps[-1] == "FULL 2"
    failure = served.prepared.events.named("capture.failed")[0].facts
    assert "failure injected" in failure["reason"]
    assert failure["retry_at_step"] == 1 + RETRY_STEPS


def test_what_keeps_failing_is_given_up(make):
    always = {"failing_captures": frozenset(range(4, 1000))}
    served = make((1, 8), strategy="lazy", options=always).capture()
    for _ in range(RETRY_STEPS << GIVE_UP_AFTER):
        served.prepared.dispatch(Batch(1, 1, is_decode=True, query_len=1))
    assert len(served.told("capture.failed")) == GIVE_UP_AFTER
    assert served.prepared.events.named("capture.failed")[-1].facts["retry_at_step"] is None
    assert served.decode(1) == "FULL 8"


def test_no_garbage_collection_for_a_lazy_capture(make, monkeypatch):
    served = make(strategy="lazy").capture()
    collections = []
    prepared = []
    monkeypatch.setattr(type(served.backend), "prepare", prepared.append)
    gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
    try:
        assert served.decode(2) == "FULL 2"
    finally:
        gc.callbacks.pop()
    assert 2 not in collections
    assert prepared == []


def test_capturing_leaves_the_random_state_alone(make):
    served = make(strategy="lazy")
    call_in_steps(served, lambda x: torch.rand(3))
    before = torch.get_rng_state()
    served.prepared.capture()
    served.prepared.dispatch(Batch(2, 2, is_decode=True, query_len=1))
    assert served.captures[2:] == ["FULL 2"]
    assert torch.equal(torch.get_rng_state(), before)


def test_after_release_a_startup_brings_the_same_graphs_back(make):
    served = make(strategy="lazy").capture()
    served.decode(2)
    served.prepared.release()
    assert served.decode(2) == "NONE 2"
    served.prepared.capture()
    assert served.decode(2) == "FULL 2"
    assert served.captures == ["PIECEWISE 8", "FULL 8", "FULL 2"] * 2


def capture_and_use(served):
    """Graphs by their use: FULL 2, PIECEWISE 4, and the others by size."""
    served.prepared.capture()
    served.prepared.seal()
    for n in range(8):
        served.decode(2)
        if n % 2:
            served.mixed(3)
    return served.captures


@pytest.mark.parametrize("strategy", ["eager", "delayed", "lazy"])
def test_vllm_57899_graphs_return_in_idle_time_the_most_used_first(make, strategy):
    served = make(strategy=strategy)
    before = capture_and_use(served)
    there = len(served.captured())
    served.prepared.release(keep="plan")
    assert (served.captured(), served.used) == ([], 0)
    assert served.prepared._core.sealed
    with pytest.raises(CaptureAfterSeal):
        served.prepared.capture()
    assert served.prepared.report()["returns"] == []
    assert served.prepared.capture_idle(1e9) == there
    back = served.captures[len(before) :]
    assert back[:2] == ["FULL 2", "PIECEWISE 4"]
    assert sorted(back) == sorted({*before})
    assert [row["graphs"] for row in served.prepared.report()["returns"]] == [there]
    assert [served.decode(2), served.mixed(3)] == ["FULL 2", "PIECEWISE 4"]
    assert served.captures == [*before, *back]


@pytest.mark.parametrize("strategy", ["eager", "delayed", "lazy"])
def test_graphs_return_between_steps_the_wanted_one_first(make, strategy):
    served = make(strategy=strategy)
    before = capture_and_use(served)
    served.prepared.release(keep="plan")
    assert [served.decode(7), served.decode(2)] == ["FULL 8", "FULL 2"]
    assert served.captures[len(before) :] == ["FULL 8", "FULL 2"]
    for n in (3, 8) * 4:
        served.mixed(n)
    assert {*served.captures[len(before) :]} == {*before}
    assert served.prepared.report()["returns"][0]["graphs"] == len({*before})


def test_a_limit_holds_when_graphs_return(make):
    whole = make(strategy="eager")
    capture_and_use(whole)
    limit = whole.used * 2 // 3
    served = make(strategy="eager", steps={"memory_limit": limit})
    capture_and_use(served)
    there = served.captured()
    assert 0 < len(there) < len(EVERYTHING)
    for _ in range(3):
        served.prepared.release(keep="plan")
        served.prepared.capture_idle(1e9)
        assert 0 < served.used <= limit
        assert served.captured() == there


def test_ranks_bring_back_the_same_graphs(make):
    orders, steps = [], [[0, 0, 0, 0, 5, 0, 0, 0], [0, 0, 0, 0, 0, 4, 0, 9]]
    for own in (0, 1):
        served = make(strategy="eager").capture()
        told = []

        def exchange(topic, facts, own=own, told=told):
            told.append((topic, facts))
            other = {"steps": steps[1 - own]} if topic == "release" else facts
            return [facts, other] if own == 0 else [other, facts]

        served.prepared._core.captures.exchange = exchange
        served.prepared._core.steps.usage = SimpleNamespace(
            by_graph=lambda own=own: dict(enumerate(steps[own])), count=lambda *_: None
        )
        served.prepared.release(keep="plan")
        assert told == [("release", {"steps": steps[own]})]
        served.prepared.capture_idle(1e9)
        orders.append(served.captures[8:])
    assert orders[0] == orders[1]
    assert orders[0][:3] == ["FULL 1", "FULL 8", "FULL 4"]


@pytest.mark.parametrize("strategy", ["delayed", "lazy", "eager"])
def test_captures_between_steps_wait_while_another_thread_has_set_the_default_dtype(make, strategy):
    """A graph keeps what operators read of it. The captures that an engine asks for are its own."""
    served = make(strategy=strategy).capture()
    if strategy == "eager":
        served.prepared.release(keep="plan")
    before = served.captured()
    torch.set_default_dtype(torch.float64)
    try:
        assert served.prepared.dispatch(Batch(2, 2, is_decode=True, query_len=1)).reason != "exact"
        assert served.prepared.capture_idle(1e9) == 0
        assert served.captured() == before
    finally:
        torch.set_default_dtype(torch.float32)
    (waits,) = served.prepared.events.named("capture.waits")
    assert waits.facts == {"changed": "default_dtype: torch.float32 -> torch.float64"}
    assert served.decode(2) == "FULL 2"
    missing = len(EVERYTHING) - len(before) - 1
    assert served.prepared.capture_idle(1e9) == missing or strategy == "lazy"


def test_captures_of_code_that_takes_over_meanwhile_wait_for_the_same_settings(make):
    served = make(strategy="lazy").capture()
    served.prepared.release()
    torch.set_default_dtype(torch.float64)
    try:
        core = served.prepared._core
        core.serve(core.code.compiled)
        core.capturer.startup_while_serving()
        core.link()
        served.prepared.dispatch(Batch(2, 2, is_decode=True, query_len=1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert served.captured() == []
    served.decode(2)
    assert len(served.captured()) == 1


def test_nothing_returns_that_was_never_there_and_another_keep_is_refused(make):
    served = make(strategy="lazy")
    served.prepared.release(keep="plan")
    assert (served.decode(2), served.prepared.capture_idle(1e9)) == ("NONE 2", 0)
    with pytest.raises(InvalidArgument, match="plan"):
        served.prepared.release(keep="graphs")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["eager", "delayed", "lazy"]),
    st.integers(1, 3),
    st.frozensets(st.integers(1, 30), max_size=6),
    st.lists(st.tuples(st.booleans(), st.integers(0, 10)), max_size=12),
)
def test_every_step_is_right_under_every_strategy(make, strategy, per_step, failing, batches):
    own = "eager" if strategy == "eager" else STRATEGIES[strategy](captures_per_step=per_step)
    served = make(strategy=own, options={"failing_captures": failing}).capture()
    served.prepared.seal()
    most = 0 if strategy == "eager" else per_step
    for is_decode, n in batches:
        before = len(served.captures)
        if n == 0:
            served.prepared.release(keep="plan")
            assert (served.captured(), served.used) == ([], 0)
            most = max(most, 1)
            continue
        served.decode(n) if is_decode else served.mixed(n)
        assert len(served.captures) - before <= most
    served.prepared.close()


def test_after_release_nothing_is_remembered_of_earlier_captures(make):
    served = make((2, 8), strategy="delayed")
    for _ in range(2):
        served.prepared.capture()
        assert served.prepared.parts.strategies.idle(0) == 0
        served.prepared.release()
    assert served.told("capture.refused") == ["PIECEWISE 2"] * 2


def test_a_step_with_nothing_to_capture_does_not_ask_the_strategy(make, monkeypatch):
    served = make((2, 4, 8), strategy="lazy").capture()
    for n in (8, 2, 9) * 3:
        served.decode(n)
    capturer, asked = served.prepared.parts.strategies.capturer, []
    monkeypatch.setattr(capturer, "before_step", lambda *facts: asked.append(facts))
    assert capturer.active
    for n in (8, 2, 9):
        served.decode(n)
    assert asked == []


def test_steps_that_do_not_ask_the_strategy_count_as_uses(make):
    served = make((1, 2, 4, 8), strategy="lazy").capture()
    for n in (2, 2, 2, 2, 1):
        served.decode(n)
    queue = served.prepared.parts.strategies.capturer.queue
    assert (queue.states[6].hits, queue.step) == (4, 5)


def test_a_batch_that_is_not_valid_captures_nothing(make):
    served = make((1, 2, 4, 8), strategy="lazy").capture()
    for num_reqs in (-1, 3):
        with pytest.raises(BatchInvalid):
            served.prepared.dispatch(Batch(2, num_reqs))
    served.mixed(2)
    with pytest.raises(BatchInvalid):
        served.prepared.dispatch(Batch(2, -1))
    assert served.captures[2:] == ["PIECEWISE 2"]
