"""An engine with one step in flight serves the same tokens, on work that is delayed."""

import functools
import itertools

import pytest

from piecegraph import ReplayBackend, ReplayOptions, prepare
from piecegraph.errors import RewrittenEarly
from piecegraph.runtime.backends.replay.work_queue import QueuePoint
from piecegraph.tools.serve import run as main_job
from piecegraph.torch_compat.basics.tensors import last_modes

from .conftest import ONE_LAYER, started

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("traced_once")]

SMALL = f"{ONE_LAYER},layers=2"
MODES = ["none", "piecewise", "full-decode-only", "full-and-piecewise"]
FEATURES = [
    {},
    {"lora": 3},
    {"speculate": 2},
    {"kv_blocks": 48, "block_size": 2, "requests": 6},  # it preempts
    {"block_size": 2, "defragment": 0, "temperature": "0,1"},
]
CASES = [
    (case, {"strategy": strategy, "requests": 24, **feature})
    for case, (feature, strategy) in enumerate(
        itertools.product(FEATURES, ("eager", "delayed", "lazy"))
    )
]


@pytest.fixture
def served(monkeypatch):
    """Serves the trace; returns each request's tokens, the steps, and the backend."""

    def serve(mode, *, replay=None, change=None, **options):
        backend = ReplayBackend(ReplayOptions(poison_before_replay=True, **(replay or {})))
        monkeypatch.setattr(main_job, "prepare", functools.partial(prepare, backend=backend))
        with started(**{"model": SMALL, "mode": mode, **options}) as engine:
            if change is not None:
                change(engine.service.engine)
            tokens = engine.serve()
            return tokens, engine.service.engine.log.steps, backend

    yield serve
    assert last_modes() == (None, None)


def overlapped(served, mode, seed=None, **options):
    """The tokens and the steps of an overlapped run with all checks."""
    replay = {"delay": True, "fail_on_early_writes": True, "delay_seed": seed}
    tokens, steps, backend = served(mode, replay=replay, overlap=True, **options)
    assert backend.queue.steps >= len(steps)
    return tokens, [step.num_tokens for step in steps]


def without_overlap(served, mode, **options):
    tokens, steps, _ = served(mode, **options)
    return tokens, [step.num_tokens for step in steps]


def test_overlap_changes_no_token(served, configured):
    """Also while each step is proved, where the memory of metadata is read once more."""
    configured(shadow={"every": 1, "share": 1.0})
    mode, options = "full-and-piecewise", {"model": f"{SMALL},layers=1", "requests": 3}
    assert overlapped(served, mode, **options) == without_overlap(served, mode, **options)


def test_blocks_move_when_the_step_in_flight_has_ended(served):
    mode, swaps = "full-and-piecewise", []
    options = {"model": f"{SMALL},layers=1", "block_size": 2, "temperature": "0,1"}

    def change(engine):
        run = engine.defragmenter.run

        def run_when_idle():
            swaps.append(engine._in_flight is not None)
            assert engine.prepared.reads_done().query()
            run()

        engine.defragmenter.run = run_when_idle
        engine.defragmenter.threshold = -1  # due at each step, also between chunks of a prompt

    moved = overlapped(served, mode, change=change, defragment=0, **options)
    assert moved == without_overlap(served, mode, **options)
    assert swaps.count(True) > 3


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
def test_300_overlapped_steps_of_each_mode_with_ten_seeds(served, mode):
    cases, expected, steps = itertools.cycle(CASES), {}, dict.fromkeys(range(10), 0)
    for seed in steps:
        while steps[seed] < 300:
            case, options = next(cases)
            if case not in expected:
                expected[case] = without_overlap(served, mode, **options)
            assert overlapped(served, mode, seed, **options) == expected[case], (seed, case)
            steps[seed] += len(expected[case][1])
    print(f"{mode}: {sum(steps.values())} steps with {len(steps)} seeds, 0 differences")


def test_failure_38_staging_memory_is_not_filled_before_its_copies(served):
    """What the engine would do wrong: rewrite staging memory that a step in flight reads."""

    def change(engine):
        engine.prepared.copies_done = lambda: QueuePoint(None)

    replay = {"delay": True, "fail_on_early_writes": True}
    with pytest.raises(RewrittenEarly, match=r"aten.copy_ \(at .*metadata.py"):
        served("full-decode-only", replay=replay, overlap=True, change=change)


def test_speculation_overlaps_where_a_step_samples_nothing(served):
    """The same drafts are verified, in the same steps."""
    options = {"model": f"{SMALL},layers=1", "requests": 3, "speculate": 2, "max_num_tokens": 9}
    mode, before = "full-and-piecewise", []

    def change(engine):
        start = engine._start

        def started(previous):
            before.append(previous is not None)
            return start(previous)

        engine._start = started

    assert overlapped(served, mode, change=change, **options) == without_overlap(
        served, mode, **options
    )
    assert set(before) == {True, False}
