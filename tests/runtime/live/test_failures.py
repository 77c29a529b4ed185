"""After any failure: the context is restored, no capture is open, and steps continue."""

import gc
import logging
import sys
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from piecegraph import Batch, get_forward_context
from piecegraph.dispatch import CaptureStrategy
from piecegraph.errors import (
    AllCapturesFailed,
    CaptureFailed,
    DecisionOfAnother,
    InputMismatch,
    InvalidSetting,
    LayerMissing,
    MetadataFailed,
    ModelClosed,
    OutsideStep,
    StepInProgress,
)
from piecegraph.runtime.capture.session import capture_session
from piecegraph.runtime.core.static_inputs import unread_buffers
from piecegraph.runtime.parts.strategies.wanted import RETRY_STEPS
from piecegraph.torch_compat.basics.structured_trace import TRACE_LOGGER
from tests.processes import at_once, in_a_thread

FAULT = ValueError("no such block")


def assert_at_rest():
    """No step, no capture and no dispatch mode is left open in this thread."""
    with pytest.raises(OutsideStep):
        get_forward_context()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert gc.isenabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("lengths", [(3,), (12,)])  # an eager segment, and no graph
def test_an_error_in_a_step_reaches_the_caller_and_the_next_step_works(serve, lengths):
    served = serve().capture()
    served.stage.fault = FAULT
    decision = served.prepared.dispatch(served.batch(*lengths))
    with pytest.raises(ValueError, match="no such block"):
        served.prepared.run(decision, torch.ones(sum(lengths), 4))
    assert_at_rest()
    served.stage.fault = None
    served.step(*lengths)


@pytest.mark.parametrize("lengths", [(3,), (12,)])  # graphs, and no graph
def test_an_interrupt_anywhere_in_a_step_leaves_the_process_as_it_was(serve, lengths):
    served = serve().capture()
    decision = served.prepared.dispatch(served.batch(*lengths))
    run = type(served.prepared._core.steps).run.__code__

    def step(at):
        """One step, interrupted before its line number `at`; returns how many lines it ran."""
        lines = 0

        def in_step(frame, event, arg):
            nonlocal lines
            if event == "line":
                lines += 1
                if lines == at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return in_step

        sys.settrace(lambda frame, event, arg: in_step if frame.f_code is run else None)
        try:
            served.prepared.run(decision, torch.ones(sum(lengths), 4))
        finally:
            sys.settrace(None)
        return lines

    for at in range(1, step(None) + 1):
        with pytest.raises(KeyboardInterrupt):
            step(at)
        assert_at_rest()
        assert not served.prepared._core.steps.running
    served.step(3)


@pytest.mark.parametrize("decision", [None, "FULL", Batch(3, 3)])
def test_what_is_no_decision_of_the_model_is_refused(serve, decision):
    served = serve().capture()
    with pytest.raises(DecisionOfAnother):
        served.prepared.run(decision, torch.ones(3, 4))
    other = serve(sizes=(3,)).capture()
    with pytest.raises(DecisionOfAnother):
        served.prepared.run(other.prepared.dispatch(other.batch(3)), torch.ones(3, 4))


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (lambda x: x.to_sparse(), "sparse_coo"),
        (lambda x: x.to_sparse_csr(), "sparse_csr"),
        (lambda x: FakeTensorMode().from_tensor(x), "fake"),
        (lambda x: torch.nested.as_nested_tensor([x[:1], x[1:]]), "nested"),
        (lambda x: x.numpy(), "ndarray"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch, about its own beta features
def test_an_input_without_rows_in_memory_is_refused_by_name(serve, form, kind):
    served = serve().capture()
    served.step(3)  # its form is known now
    with pytest.raises(InputMismatch, match=f"'x' is .*{kind}"):
        served.prepared.run(served.prepared.dispatch(served.batch(3)), form(torch.ones(3, 4)))
    served.step(3)


def test_buffers_that_the_model_does_not_read_are_ignored(serve):
    with pytest.raises(InvalidSetting, match="no such input"):
        serve(input_buffers={"typo": torch.zeros(16)})
    plan = serve().prepared.compiled.plan
    unread = plan.model_copy(update={"parameters": (*plan.parameters, "positions")})
    buffers = {"x": torch.zeros(16, 4), "positions": torch.zeros(16)}
    assert unread_buffers(unread, buffers) == ["positions"]


@pytest.mark.parametrize("strategy", CaptureStrategy)
def test_w23_an_error_while_capturing_leaves_a_process_that_serves(serve, strategy):
    served = serve(strategy=strategy)
    served.stage.fault = FAULT
    with pytest.raises(AllCapturesFailed, match="ValueError: no such block"):
        served.prepared.capture()
    assert_at_rest()
    assert served.captured() == []
    reasons = {event.facts["reason"] for event in served.prepared.events.named("capture.failed")}
    assert all("ValueError: no such block" in reason for reason in reasons)
    assert reasons
    assert served.backend.memory().used == 0
    served.stage.fault = None
    served.prepared.seal()
    assert served.step(3).startswith("NONE")
    prepared = weakref.ref(served.prepared)
    del served  # the op's error lives on
    gc.collect()
    assert prepared() is None


def test_w23_an_error_in_a_graph_leaves_the_mode_below(serve):
    # each PIECEWISE recording opens four graphs; those of FULL come after them
    served = serve(sizes=(2,), options={"failing_captures": frozenset({5})}).capture()
    assert_at_rest()
    assert served.step(1, 1) == "PIECEWISE 2"
    (event,) = served.prepared.events.named("capture.failed")
    assert "failure injected" in event.facts["reason"]


def no_metadata(descriptor, mode):
    raise RuntimeError("block table is full")


@pytest.mark.parametrize(
    "settings", [{}, {"steps": {"memory_limit": 0.5}}, {"strategy": "delayed"}]
)
def test_vllm_54044_metadata_that_cannot_be_made_is_the_callers_error(serve, settings):
    served = serve(**settings)
    line = no_metadata.__code__.co_firstlineno + 1
    with pytest.raises(MetadataFailed, match=f"RuntimeError: block.*test_failures.py:{line}"):
        served.prepared.capture(no_metadata)
    assert_at_rest()
    assert served.captured() == []
    assert served.prepared.events.named("capture.failed") == []
    assert served.step(1, 1) == "NONE 2"
    served.prepared.capture(lambda descriptor, mode: None)
    assert served.step(1, 1).startswith("FULL")


@pytest.mark.parametrize("settings", [{}, {"steps": {"memory_limit": 0.5}}])
@pytest.mark.parametrize("call", ["capture", "warm_up"])
def test_a_layer_that_prepare_was_not_given_is_the_callers_error(serve, settings, call):
    served = serve(**settings)
    context = served.prepared._core.steps.context
    layers, context.layers = context.layers, {"other": 1}
    named = r"no layer 'stage'; it has other \(at .*conftest.py:.*layers="
    with pytest.raises(LayerMissing, match=named):
        getattr(served.prepared, call)()
    assert_at_rest()
    assert served.prepared._core.steps.context.layers == {"other": 1}
    served.prepared._core.steps.context.layers = layers
    assert served.step(3) == "NONE 3"
    served.prepared.capture()
    assert served.step(3) == "PIECEWISE 4"


def test_a_key_error_of_the_ops_own_is_a_failed_capture(serve):
    served = serve()
    served.stage.fault = KeyError("stage")
    with pytest.raises(AllCapturesFailed, match="KeyError"):
        served.prepared.capture()
    assert served.prepared.events.named("capture.failed")


def test_metadata_that_cannot_be_made_between_steps_is_reported(serve):
    served = serve(strategy="delayed")
    served.prepared.capture(lambda descriptor, mode: None)
    served.prepared._core.dummies.metadata_for = no_metadata
    assert served.step(1, 1) == "FULL 8"
    assert_at_rest()
    (event,) = served.prepared.events.named("capture.failed")
    assert "block table is full" in event.facts["reason"]


def test_metadata_that_does_not_fit_the_device_fails_one_capture_only(serve):
    def large(descriptor, mode):
        if descriptor.num_tokens == 8:
            raise torch.OutOfMemoryError("8 blocks")

    served = serve()
    served.prepared.capture(large)
    assert [served.step(8), served.step(4)] == ["NONE 8", "PIECEWISE 4"]


def test_an_interrupt_during_warm_up_exits_cleanly(serve):
    served = serve()
    seen = []

    def interrupt(descriptor, mode):
        seen.append(descriptor)
        if len(seen) == 5:  # each capture asks twice
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served.prepared.capture(interrupt)
    assert_at_rest()
    assert len(served.captured()) == 2
    for lengths in ((1, 1), (3,), (8,), (12,)):
        served.step(*lengths)
    served.prepared.close()
    assert served.backend.memory().used == 0


def test_gradients_and_inference_mode_of_the_caller_are_unchanged(serve):
    served = serve().capture()
    x = torch.ones(2, 4, requires_grad=True)
    decision = served.prepared.dispatch(served.batch(1, 1))
    assert not served.prepared.run(decision, x).requires_grad
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        assert torch.is_inference_mode_enabled()
        served.step(1, 1)
        served.step(3)
    served.step(3)


def test_two_models_in_two_threads_are_independent(serve):
    both = [serve(strategy=strategy) for strategy in ("eager", "lazy")]
    start = threading.Barrier(2)

    def run(served):
        start.wait()
        served.prepared.capture()
        for _ in range(15):
            for lengths in ((1, 1), (3,), (5, 3), (12,), (1,) * 7):
                served.step(*lengths)

    at_once(run, both)
    assert all(served.captured() for served in both)


@pytest.mark.parametrize(
    "action",
    [
        lambda prepared: prepared(torch.ones(3, 4), batch=Batch(3, 1)),
        lambda prepared: in_a_thread(lambda: prepared(torch.ones(3, 4), batch=Batch(3, 1))),
        lambda prepared: prepared.refresh(),
        lambda prepared: prepared.release(),
    ],
    ids=["step", "step of a thread", "refresh", "release"],
)
@pytest.mark.parametrize("lengths", [(3,), (12,)])
def test_what_starts_in_the_middle_of_a_step_is_refused(serve, monkeypatch, action, lengths):
    served = serve().capture()
    served.step(*lengths)
    with monkeypatch.context() as patch:
        patch.setattr(type(served.stage), "fault", property(lambda s: action(served.prepared)))
        with pytest.raises(StepInProgress, match="one step at a time"):
            served.step(*lengths)
    served.step(*lengths)


def test_w14_nothing_is_captured_while_serving_under_eager(serve):
    served = serve(sizes=(2, 4), options={"failing_captures": frozenset({1})}).capture()
    served.prepared.seal()
    assert not served.prepared.parts.strategies.capturer.active  # no step asks
    captures = served.backend.counters["captures"]
    for lengths in ((4,), (3,), (1, 1), (12,)):
        served.step(*lengths)
    for _ in range(2 * RETRY_STEPS):  # after which other strategies try again
        served.prepared.dispatch(served.batch(4))
    assert served.backend.counters["captures"] == captures
    assert served.step(4) == "NONE 4"  # the one whose capture failed


def test_a_dummy_batch_gives_the_context_its_layers_back(serve):
    served = serve()
    layers = served.prepared._core.steps.context.layers
    served.prepared.capture()
    assert served.prepared._core.steps.context.layers is layers


def test_failure_28_a_nan_of_an_earlier_step_is_in_no_padding(serve):
    served = serve(steps={"padding": {"x": "zero"}}).capture()
    batch = served.batch(5, 3)
    served.prepared.run(served.prepared.dispatch(batch), torch.full((8, 4), float("nan")))
    for lengths in ((3, 2), (1,) * 5):
        served.step(*lengths)
        graph_index = served.prepared.dispatch(served.batch(*lengths)).graph_index
        outputs = dict(served.prepared.recordings())[graph_index].outputs
        inputs = served.prepared._core.dummies.inputs(graph_index).views
        assert all(tensor.isfinite().all() for tensor in (*inputs, *outputs))


def test_failure_28_ops_read_how_many_rows_are_real(serve):
    served = serve().capture()
    seen = []

    class Watching(list):
        def __getitem__(self, key):
            seen.append(get_forward_context().num_tokens)
            return served.stage

    served.prepared._core.steps.context.layers = Watching()
    served.step(3)
    assert seen[:3] == [3, 3, 3]


def test_a_failed_capture_holds_nothing(serve):
    served = serve()
    prepared, calls = served.prepared, []

    class FailingLater(dict):
        def __getitem__(self, key):
            calls.append(key)
            if len(calls) == 5:  # the second of three layers, after a run without a graph
                raise FAULT
            return served.stage

    prepared._core.steps.context.layers = FailingLater()
    pool = served.backend.new_pool()
    with capture_session(served.backend, pool, prepared.events) as session:
        with pytest.raises(CaptureFailed, match="no such block"):
            prepared._core.graphs.record(0, session)
        assert len(calls) == 5
        assert session._held == []


@pytest.mark.parametrize("call", ["capture", "warm_up", "memory_plan", "seal", "refresh", "run"])
def test_a_model_that_was_closed_twice_refuses(serve, call):
    served = serve().capture()
    step = (served.prepared.dispatch(served.batch(1, 1)), torch.ones(2, 4))
    for _ in range(2):
        served.prepared.close()
    handlers = logging.getLogger(TRACE_LOGGER).handlers[:]
    with pytest.raises(ModelClosed):
        getattr(served.prepared, call)(*step if call == "run" else ())
    assert logging.getLogger(TRACE_LOGGER).handlers == handlers
