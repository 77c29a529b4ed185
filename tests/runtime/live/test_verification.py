"""A warm start traces the model again beside its steps: a stale bundle serves for a trace at most.

Conditions are switched off here, so that only the verification can refuse a bundle.
"""

import json
import logging
import random
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from piecegraph import Batch, ForwardContext, Ranks, explain_miss, forward_context
from piecegraph.cache.settings import CacheSettings
from piecegraph.compile import verify
from piecegraph.compile.bundle import bundle as bundles
from piecegraph.compile.trace import dynamo
from piecegraph.errors import BundleStale, ModelChanged
from piecegraph.runtime.core.records import Stale
from piecegraph.runtime.parts.checks.model_check import ModelCheck
from piecegraph.runtime.parts.starts import tracing_thread, verification
from piecegraph.runtime.parts.starts.tracing_thread import STEPS_PER_EXCHANGE
from piecegraph.torch_compat.faster.equal_layers.match import Match
from tests.processes import two_ranks

from .conftest import LENGTHS, Gained, Model, Scale

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def on(monkeypatch):
    monkeypatch.delenv("PIECEGRAPH_OFF", raising=False)


def test_report_log_and_forecast_name_the_condition_that_refused(prepare_live, caplog):
    off = CacheSettings(verify_bundle="off")
    assert prepare_live(Gained(2.0), cache=off).prepared.report()["cache"]["detail"] is None
    with caplog.at_level(logging.WARNING, logger="piecegraph"):
        refused = prepare_live(Gained(3.0), cache=off).prepared
    condition = "model.gain: 2.0 -> 3.0"
    facts = refused.report()["cache"]
    assert (facts["hit"], facts["reason"], facts["detail"]) == (False, "refused", condition)
    assert refused.report()["counters"]["cache.miss.refused"] == 1
    assert caplog.text.count(condition) == 1
    with forward_context(ForwardContext({"stage": None})):
        forecast = explain_miss(Gained(4.0), refused.config)
    assert forecast.reason == "refused: model.gain: 2.0 -> 4.0 | model.gain: 3.0 -> 4.0"


class Sliced(Model):
    """Its forward makes a list of modules, as models of transformers do."""

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        return super().forward(x)


def test_hooks_of_other_models_are_in_no_trace(prepare_live):
    """Each prepared model is told of new modules by torch's hooks, which a trace goes through."""
    served = [prepare_live(Sliced()) for _ in range(3)]
    assert [each.prepared.report()["cache"]["hit"] for each in served] == [False, True, True]
    assert served[2].prepared.parts.starts.wait_until_verified(300) is True


@pytest.fixture
def blind(monkeypatch):
    """No condition refuses a bundle, and no look at the model in turn is fast enough."""
    monkeypatch.setattr(bundles, "broken_conditions", lambda *_: [])
    monkeypatch.setattr(ModelCheck, "check_step", lambda *_: None)


@pytest.fixture
def stale_start(prepare_live, blind):
    """A start from the bundle that another process made of a model with another gain."""
    prepare_live(Gained(2.0), cache=CacheSettings(verify_bundle="off"))

    def start(when="background", **settings):
        return prepare_live(Gained(3.0), cache=CacheSettings(verify_bundle=when), **settings)

    return start


def wrong(served):
    try:
        served.step(3, 1)
    except AssertionError:
        return True
    return False


def test_a_stale_bundle_serves_until_the_trace_has_found_it(stale_start, prepare_live, caplog):
    served = stale_start(steps={"after_seal": "raise"})
    assert wrong(served)  # what conditions let through, nothing else can see at once
    served.prepared.capture()
    served.prepared.seal()
    assert len(served.prepared.recordings()) == 3
    assert served.prepared.parts.starts.wait_until_verified(300) is False
    (found,) = served.prepared.records.of(Stale)
    assert found.difference.startswith("piece 2 of 3: it has `")
    assert "* 2.0" in found.difference
    assert "* 3.0" in found.difference
    assert "conftest.py" in found.difference
    assert "bundle.stale" in caplog.text
    assert served.step(3, 1) == "NONE 4"  # uncompiled; graphs of the stale code are gone
    assert served.prepared.parts.starts.wait_until_compiled(300)
    for lengths in LENGTHS:
        served.step(*lengths)
    assert served.step(8) == "PIECEWISE 8"
    assert served.prepared.report()["cache"]["verified"] is False
    following = prepare_live(Gained(3.0), cache=CacheSettings(verify_bundle="background"))
    assert following.prepared.compiled.from_bundle
    following.step(3, 1)
    assert following.prepared.parts.starts.wait_until_verified(300) is True


def test_a_stale_bundle_is_not_loaded_again_where_the_new_one_has_another_key(
    stale_start, prepare_live, monkeypatch
):
    """An engine changes the state of the process for the moment in which the key is made."""
    served, moments = stale_start(), [{"state": "another"}]
    store = bundles.store_bundle

    def store_in_a_moment(request, key, *others):
        return store(request, key.extended(moments.pop() if moments else {}), *others)

    monkeypatch.setattr(bundles, "store_bundle", store_in_a_moment)
    assert served.prepared.parts.starts.wait_until_verified(300) is False
    served.step(3, 1)
    assert served.prepared.parts.starts.wait_until_compiled(300)
    assert not moments
    served.step(3, 1)
    following = prepare_live(Gained(3.0), cache=CacheSettings(verify_bundle="background"))
    assert following.prepared.parts.starts.wait_until_verified(300) is True


def test_a_stale_bundle_that_is_forced_raises_before_the_next_step(stale_start):
    served = stale_start(bundle="force")
    with pytest.raises(BundleStale, match=r"piece 2 of 3.*\* 3.0"):
        served.prepared.parts.starts.wait_until_verified(300)
    for _ in range(2):
        with pytest.raises(BundleStale):
            served.step(3, 1)


@pytest.mark.parametrize("use", ["use", "serve"])
def test_verified_before_the_first_step_it_never_serves(stale_start, use):
    served = stale_start("before", bundle=use)
    assert served.prepared.report()["cache"]["verified"] is False
    served.step(3, 1)
    assert served.prepared.parts.starts.wait_until_compiled(300)
    served.step(3, 1)


def test_verified_before_the_first_step_a_forced_one_is_refused(stale_start):
    with pytest.raises(BundleStale, match="piece 2 of 3"):
        stale_start("before", bundle="force")


STEP: dict[str, str] = {}
"""What an engine sets for each step, and a forward reads."""


class ReadsTheStep(Model):
    def forward(self, x):
        if "batch" in STEP:
            x = x * 3
        return super().forward(x)


def test_what_steps_set_makes_no_bundle_stale(prepare_live, monkeypatch, caplog):
    """A trace beside a step reads it; in `prepare`, of either start, it was not set."""
    off = CacheSettings(verify_bundle="off")
    prepare_live(ReadsTheStep(), cache=off)
    with monkeypatch.context() as within_a_step:
        starts = prepare_live(ReadsTheStep()).prepared.parts.starts
        within_a_step.setitem(STEP, "batch", "of this step")
        while starts.wait_until_verified(0.1) == "not yet":
            pass
        time.sleep(1.0)  # another try
        assert "what the forward reads has changed since `prepare`: " in caplog.text
        assert not starts._core.environment.records.of(Stale)
    assert starts.wait_until_verified(300) is True


def test_every_warm_start_verifies_in_a_process_that_is_equal_too(prepare_live, blind):
    """What the model was made of, such as a file that the program has read, is in no list."""

    def start(gain):
        prepared = prepare_live(Gained(gain)).prepared
        at_first = prepared.report()["cache"]["verified"]
        return at_first, prepared.parts.starts.wait_until_verified(300)

    traced = "the model was traced by this start"
    assert start(2.0) == (traced, traced)
    assert start(2.0) == start(2.0) == ("not yet", True)
    assert start(3.0) == ("not yet", False)


@pytest.fixture
def cannot_compare(monkeypatch):
    monkeypatch.setattr(tracing_thread, "PAUSES_S", (0.01, 0.01, 0.01))

    def fail(*_):
        raise RuntimeError("no trace here")

    monkeypatch.setattr(verify, "trace_with_guards", fail)


NO_TRACE = "RuntimeError: no trace here"


def test_what_cannot_be_compared_beside_serving_goes_on_and_says_so(
    prepare_live, cannot_compare, caplog, hostile_engine
):
    prepare_live()
    prepared = prepare_live().prepared
    why = prepared.parts.starts.wait_until_verified(300)
    shown = NO_TRACE
    if hostile_engine is not None and why != NO_TRACE:
        shown = "has changed since"  # what its `torch.fx` had replaced at the last try
    assert shown in str(why)
    assert prepared.report()["cache"]["verified"] == why
    assert prepared.compiled.from_bundle
    assert shown in caplog.text


def test_what_cannot_be_compared_before_the_first_step_is_compiled(prepare_live, cannot_compare):
    prepare_live()
    served = prepare_live(cache=CacheSettings(verify_bundle="before"))
    assert served.prepared.report()["cache"]["verified"] == NO_TRACE
    assert not served.prepared.compiled.from_bundle
    served.step(3, 1)
    with pytest.raises(BundleStale, match=NO_TRACE):
        prepare_live(cache=CacheSettings(verify_bundle="before"), bundle="force")


def leave_on_a_rank(rank, folder, prepare, bundle):
    """A forked rank, of which one has another model: steps until the bundle is left."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    served = prepare(Gained(2.0 + rank), ranks=Ranks(), bundle=bundle)
    served.prepared.capture()
    raised, steps = "", 0
    while served.prepared.compiled.from_bundle:
        steps += 1
        with suppress(ModelChanged):  # conditions are looked at from time to time
            served.prepared(torch.ones(3, 4), batch=Batch(3, 3))
        time.sleep(0.003)
    for lengths in LENGTHS:
        served.step(*lengths)
    verified = served.prepared.report()["cache"]["verified"]
    if bundle == "force":
        with pytest.raises(BundleStale):
            served.prepared.parts.starts.wait_until_verified()
        with pytest.raises(BundleStale, match="piece 2 of 3") as stale:
            served.prepared(torch.ones(3, 4), batch=Batch(3, 3))
        raised = str(stale.value)
    (folder / f"{rank}.json").write_text(json.dumps([steps, raised, verified]))
    served.prepared.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks
@pytest.mark.parametrize("bundle", ["use", "force"])
def test_ranks_leave_a_bundle_at_the_same_step_and_a_forced_one_raises_once_waited_for(
    prepare_live, blind, tmp_path, bundle
):
    prepare_live(Gained(2.0), cache=CacheSettings(verify_bundle="off"))
    two_ranks(leave_on_a_rank, tmp_path, prepare_live, bundle)
    one, other = (json.loads((tmp_path / f"{i}.json").read_text()) for i in (0, 1))
    assert one[0] == other[0]
    assert one[0] % STEPS_PER_EXCHANGE == 0
    assert ("rank 1: piece 2 of 3" in one[1]) == bool(other[1]) == (bundle == "force")
    assert one[2] is other[2] is False


def test_off_traces_nothing(prepare_live):
    off = CacheSettings(verify_bundle="off")
    prepare_live(cache=off)
    served = prepare_live(cache=off)
    assert served.prepared.parts.starts.wait_until_verified(0) == "verify_bundle is 'off'"


def test_numbers_drawn_beside_a_trace_do_not_repeat(serve_cold):
    """Dynamo takes back what was drawn from the generators while it traced."""
    torch.manual_seed(0)
    state, numbers = torch.get_rng_state(), list[torch.Tensor]()
    served = serve_cold()
    torch.set_rng_state(state)
    while served.prepared.report()["background"]["switch"] is None:
        numbers.append(torch.rand(1))
        served.prepared.parts.strategies.idle(0)
    torch.set_rng_state(state)
    assert torch.equal(torch.cat(numbers), torch.cat([torch.rand(1) for _ in numbers]))


@pytest.fixture
def dtype_changed_beside_a_trace(monkeypatch):
    """Another thread changes the default dtype during the first trace in a thread."""
    changed = []

    def beside_a_change(capture):
        def capture_beside_a_change(*args):
            captured = capture(*args)
            thread = threading.current_thread()
            if thread is not threading.main_thread() and not changed:
                other = threading.Thread(target=torch.set_default_dtype, args=(torch.float64,))
                other.start()
                other.join()
                changed.append(thread.name)  # the test sets the dtype back from here on
                raise AssertionError("Global default_dtype state changed")  # as Dynamo does
            return captured

        return capture_beside_a_change

    for name in ("capture", "capture_full_graph"):
        monkeypatch.setattr(dynamo, name, beside_a_change(getattr(dynamo, name)))
    yield changed
    torch.set_default_dtype(torch.float32)


def test_under_another_state_than_that_of_prepare_nothing_is_known(
    prepare_live, dtype_changed_beside_a_trace, hostile_engine
):
    prepare_live()
    starts, verified = prepare_live().prepared.parts.starts, "not yet"
    while verified == "not yet" or not dtype_changed_beside_a_trace:
        verified = starts.wait_until_verified(0.1)
    assert verified is not False
    # a hostile engine changes more beside the same trace, and sets the dtype back
    assert "default_dtype" in str(verified) or hostile_engine is not None
    assert dtype_changed_beside_a_trace == ["piecegraph-verification"]
    torch.set_default_dtype(torch.float32)
    assert starts.wait_until_verified(300) is True


def test_code_is_made_stored_and_served_under_the_state_of_prepare(
    serve_cold, prepare_live, dtype_changed_beside_a_trace
):
    model = Model()
    served = serve_cold(model)
    while not dtype_changed_beside_a_trace:
        assert not served.prepared.parts.starts.wait_until_compiled(0.1)
    assert dtype_changed_beside_a_trace == ["piecegraph-background"]
    torch.set_default_dtype(torch.float32)
    assert served.prepared.parts.starts.wait_until_compiled(300)
    torch.set_default_dtype(torch.float64)
    assert not prepare_live(model).prepared.compiled.from_bundle
    torch.set_default_dtype(torch.float32)
    assert prepare_live(model).prepared.compiled.from_bundle


def test_the_switch_waits_for_the_state_of_prepare(serve_cold):
    prepared = serve_cold().prepared
    assert prepared.parts.starts.beside.thread.join(300)
    for dtype, switches in ((torch.float64, False), (torch.float32, True)):
        torch.set_default_dtype(dtype)
        prepared.parts.strategies.idle(0)
        assert prepared.compiled.traced == switches


def test_a_model_that_is_dropped_or_closed_ends_its_trace(prepare_live, monkeypatch):
    monkeypatch.setattr(verification, "LATEST_START_S", 600.0)
    prepare_live()
    served, begun = prepare_live(), list[str]()
    threads = [t for t in threading.enumerate() if t.name == "piecegraph-verification"]
    assert len(threads) == 1
    monkeypatch.setattr(verification.Verification, "_compared", lambda self: begun.append("trace"))
    served.prepared.close()
    assert not threads[0].is_alive()
    assert not begun


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator
@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.heavy)])
def test_an_error_at_any_point_of_a_trace_is_no_difference(prepare_live, monkeypatch, count):
    """MemoryError or SystemError at the n-th call of Python code of the first try."""
    monkeypatch.setattr(tracing_thread, "PAUSES_S", (0.01,) * 5)
    trace, points, raised = verify.trace_with_guards, list[int](), list[str]()

    def raises_once(request):
        left = points.pop() if points else 0

        def profile(frame, event, _):
            nonlocal left
            left -= event == "call"
            if not left:
                sys.setprofile(None)
                raised.append(frame.f_code.co_name)
                raise random.choice([MemoryError, SystemError])("injected")

        sys.setprofile(profile if left else None)
        try:
            return trace(request)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(verify, "trace_with_guards", raises_once)
    prepare_live()
    for point in [random.randrange(1, 60_000) for _ in range(count)]:
        points.append(point)
        served = prepare_live(bundle="force")
        assert served.prepared.parts.starts.wait_until_verified(300) is True, raised[-1:]
        served.step(3, 1)
        served.prepared.close()
    assert len(raised) > count // 2 - 4


def test_no_try_meets_what_an_error_left_in_its_thread(prepare_live, monkeypatch):
    monkeypatch.setattr(tracing_thread, "PAUSES_S", (0.01,) * 5)
    trace, failed = verify.trace_with_guards, list[bool]()

    def fails_once(request):
        if not failed:
            failed.append(True)
            torch.set_default_device("meta")
            raise MemoryError
        return trace(request)

    monkeypatch.setattr(verify, "trace_with_guards", fails_once)
    prepare_live()
    served = prepare_live(bundle="force")
    assert served.prepared.parts.starts.wait_until_verified(30) is True
    assert failed


def test_a_fault_of_the_copies_of_layers_is_found(prepare_live, blind, monkeypatch):
    """Any two layers count as equal: only the first gain is in the graph."""
    monkeypatch.setattr(Match, "_difference", lambda *_: None)
    monkeypatch.setattr(Match, "_read_difference", lambda *_: None)

    class Gains(Scale):
        def __init__(self, gain):
            super().__init__()
            self.gain = gain

        def forward(self, x):
            return super().forward(x) * self.gain

    def model():
        made = Model()
        made.layers = torch.nn.ModuleList(map(Gains, (1.0, 2.0, 3.0)))
        return made.requires_grad_(False)

    assert wrong(prepare_live(model()))
    assert prepare_live(model()).prepared.parts.starts.wait_until_verified(300) is False
