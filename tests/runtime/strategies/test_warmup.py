"""Warm-up runs its plan in order, reports each item, and changes no state."""

import pytest
import torch

from piecegraph import AuxiliaryTask, Batch, get_forward_context
from piecegraph.errors import InvalidSetting
from piecegraph.runtime.capture.breaks import recordable

from .conftest import call_in_steps


def facts(served, name):
    return [event.facts for event in served.prepared.events.named(name)]


def owners(served):
    """The bytes of each owner of memory."""
    rows = served.prepared.parts.strategies.ledger.rows()
    return {row["owner"]: row["bytes"] for row in rows}


def task(done, *shapes):
    return AuxiliaryTask("sampler", shapes, "it follows each step", done.append)


def test_the_plan_runs_in_order_with_progress(make):
    served = make((2, 8), strategy="eager", options={"limit": 10**6})
    done = []
    lines = []
    served.prepared.warm_up(None, [task(done, 1, 4)], show=lines.append)
    plan = facts(served, "warmup.plan")[0]["items"]
    assert [(item["kind"], item["shape"]) for item in plan] == [
        ("range", "num_tokens 2048"),
        ("range", "num_tokens 1"),
        ("capture", "PIECEWISE 8"),
        ("capture", "PIECEWISE 2"),
        ("capture", "FULL 8"),
        ("capture", "FULL 2"),
        ("sampler", "1"),
        ("sampler", "4"),
    ]
    assert all(item["why"] for item in plan)
    steps = facts(served, "warmup")
    assert [(step["kind"], step["shape"]) for step in steps] == [
        (item["kind"], item["shape"]) for item in plan
    ]
    assert [(step["n"], step["of"]) for step in steps] == [(n, 8) for n in range(1, 9)]
    assert all(step["ms"] >= 0 and step["free_bytes"] <= 10**6 for step in steps)
    assert steps[-1]["free_bytes"] < 10**6
    assert len(lines) == 8
    assert lines[2].startswith("3 of 8: capture PIECEWISE 8, ")
    assert steps[2]["taken"] > 0 == steps[2]["released"]
    assert lines[2].endswith(
        f"{steps[2]['taken']} bytes taken, {steps[2]['free_bytes']} bytes free"
    )
    assert done == [1, 4]


def test_memory_that_an_item_gives_back_is_shown_as_released(make):
    served = make((8,), strategy="eager", options={"graph_bytes": 1000})
    lines = []
    free = AuxiliaryTask("release", [1], "a test", lambda _: served.prepared.release())
    served.prepared.warm_up(None, [free], show=lines.append)
    last = facts(served, "warmup")[-1]
    assert last["taken"] == 0 < last["released"]
    assert lines[-1].endswith(f"{last['released']} bytes released")


def test_what_is_skipped_is_said_with_its_cost(make):
    served = make((2, 8), strategy="eager")
    done = []
    other, empty = AuxiliaryTask("other", [2], "", done.append), AuxiliaryTask("e", [], "", print)
    served.prepared.warm_up(None, [task(done, 1), other, empty], skip=["capture", "sampler"])
    skipped = {fact["kind"]: fact for fact in facts(served, "warmup.skipped")}
    assert list(skipped) == ["capture", "sampler", "e"]
    assert (skipped["sampler"]["shapes"], skipped["e"]["shapes"]) == (["1"], [])
    assert skipped["capture"]["shapes"] == ["PIECEWISE 8", "PIECEWISE 2", "FULL 8", "FULL 2"]
    assert "without a graph" in skipped["capture"]["cost"]
    assert done == [2]
    assert served.captures == []
    assert served.decode(2) == "NONE 2"


def test_every_range_is_run_without_a_graph(make):
    served, sizes = make((8,), strategy="lazy"), []
    call_in_steps(served, lambda x: sizes.append(len(x)))
    served.prepared.warm_up(None, skip=["capture"])
    assert sizes == [2048] * 4 + [1]  # the first batch runs three times more, see `dummy_batch`


def test_the_random_state_is_as_before(make):
    served = make((8,), strategy="eager")
    call_in_steps(served, lambda x: torch.rand(3))
    before = torch.get_rng_state()
    drawing = AuxiliaryTask("drawing", [1], "", lambda shape: torch.rand(3))
    served.prepared.warm_up(None, [drawing])
    assert torch.equal(torch.get_rng_state(), before)
    assert served.decode(3) == "FULL 8"


def test_a_failing_task_is_the_engines_own_error(make):
    served = make((8,), strategy="eager")

    def broken(shape):
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        served.prepared.warm_up(None, [AuxiliaryTask("broken", [1], "", broken)])
    assert served.decode(3) == "FULL 8"


def test_the_memory_plan_is_known_before_anything_is_captured(make):
    total = 1_000_000
    served = make((1, 2, 4, 8), strategy="eager", options={"graph_bytes": 1000, "limit": total})
    foreseen = served.prepared.memory_plan(0.5)
    assert served.used == 0
    assert served.captures == []
    assert owners(served) == {"weights": 16, "static buffers": 2048 * 16}
    served.prepared.capture()
    assert foreseen.graphs == pytest.approx(served.used, rel=0.1)
    assert foreseen.kv_cache == total // 2 - 16 - 2048 * 16 - foreseen.graphs
    plan = served.prepared.memory_plan(0.5)
    assert plan.graphs == served.used
    assert owners(served)["graph pool PIECEWISE"] + owners(served)["graph pool FULL"] == served.used


def with_metadata(descriptor, mode):
    return {"block_table": descriptor.num_tokens}


def needing_metadata(make, **settings):
    """A model whose attention looks something up in its metadata."""
    served = make((2, 8), options={"graph_bytes": 1000, "limit": 10**6}, **settings)
    core, compiled = served.prepared._core, served.prepared.compiled
    call = recordable(compiled, ())
    core.graphs._recordable[core.code] = (
        compiled,
        lambda *inputs: (get_forward_context().metadata["block_table"], call(*inputs))[1],
    )
    return served


@pytest.mark.parametrize("settings", [{}, {"steps": {"memory_limit": 10**5}}])
def test_a_plan_without_the_metadata_that_attention_needs_keeps_no_graph_away(make, settings):
    served = needing_metadata(make, **settings)
    assert served.prepared.memory_plan().graphs == 0
    assert served.prepared.memory_plan(metadata_for=with_metadata).graphs > 0
    served = needing_metadata(make, **settings)
    assert served.prepared.memory_plan().graphs == 0
    served.prepared.capture(with_metadata)
    assert served.captures == ["PIECEWISE 8", "PIECEWISE 2", "FULL 8", "FULL 2"]


def test_metadata_given_once_holds_for_later_captures(make):
    served = needing_metadata(make, strategy="lazy")
    served.prepared.warm_up(with_metadata)
    assert served.prepared.memory_plan().graphs > 0
    served.prepared.dispatch(Batch(2, 2, is_decode=True, query_len=1))
    assert served.captures == ["PIECEWISE 8", "FULL 8", "FULL 2"]


def test_a_plan_and_a_capture_probe_once_and_dropped_sizes_do_not_count_in_the_plan(make):
    options = {"graph_bytes": 1000, "limit": 10**6}
    served = make((1, 2, 4, 8), steps={"memory_limit": 5000}, options=options)
    assert served.prepared.memory_plan().graphs <= 5000
    probed = len(facts(served, "capture.recorded"))
    assert probed == 10
    served.prepared.capture()
    assert len(facts(served, "capture.recorded")) == probed + len(served.captures)


@pytest.mark.parametrize("skip", ["ranges", "captures"])
def test_an_unknown_kind_to_skip_is_refused(make, skip):
    served = make((8,))
    with pytest.raises(InvalidSetting, match="Choose one of range, capture"):
        served.prepared.warm_up(skip=[skip])
    assert served.captures == []


def test_released_pools_take_nothing_in_the_ledger(make):
    served = make((8,), options={"graph_bytes": 1000}).capture()
    served.prepared.memory_plan()
    before = owners(served)
    served.prepared.release()
    assert before["graph pool FULL"] > 0
    assert owners(served) == {**before, "graph pool FULL": 0, "graph pool PIECEWISE": 0}
