"""What a recording consists of, and that replaying it equals running the function."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from piecegraph.errors import (
    CaptureFailed,
    EagerResultChanged,
    NestedCapture,
    NoCaptureSession,
    RecordingReleased,
)
from piecegraph.runtime.capture.breaks import break_graph, opaque_piece
from piecegraph.runtime.capture.recorder import record
from piecegraph.runtime.capture.session import capture_session
from piecegraph.runtime.forward_context import (
    ForwardContext,
    forward_context,
    get_forward_context,
)
from tests.processes import at_once

from .conftest import found_by

GRAPH, EAGER = "graph", "eager"


@break_graph
def attend(q, out):
    out.copy_(q.cumsum(0))


@break_graph
def attend_fresh(q):
    return q.cumsum(0)


def layers(x):
    for _ in range(2):
        x = x * 2
        out = torch.empty_like(x)
        attend(x, out)
        x = x + out
    return x


def layers_by_hand(x):
    for _ in range(2):
        x = x * 2
        x = x + x.cumsum(0)
    return x


def kinds(recording):
    return [str(segment.kind) for segment in recording.segments]


@pytest.mark.parametrize("breaks", [True, False])
def test_failure_24_replay_computes_the_function_on_changed_inputs(rig, breaks):
    x = rig.rand(3, 4)
    recording = rig.record(layers, x, breaks=breaks)
    for _ in range(3):
        x.copy_(rig.rand(3, 4))
        recording.replay()
        assert_close(recording.outputs, layers_by_hand(x))


@pytest.mark.parametrize("breaks", [True, False])
def test_a_capture_executes_nothing_beyond_the_warm_up_run(rig, breaks):
    """An emulation must run what the next graph of a PIECEWISE recording depends on."""
    captured, eager = rig.rand(2).zero_(), rig.rand(2).zero_()

    @break_graph
    def update(x):
        eager.add_(x)

    def step(x):
        captured.add_(x)
        update(x)
        return captured + eager

    x = rig.rand(2).fill_(1)
    recording = rig.record(step, x, breaks=breaks)
    runs = 2 if breaks and rig.backend.runs_python else 1
    assert captured.tolist() == eager.tolist() == [runs] * 2
    recording.replay()
    assert captured.tolist() == eager.tolist() == [runs + 1] * 2
    assert recording.outputs.tolist() == [2 * (runs + 1)] * 2


def test_a_full_graph_is_not_replayed_in_its_capture(make_replay_rig):
    rig = make_replay_rig()
    recording = rig.record(layers, rig.rand(3, 4), breaks=False)
    assert rig.backend.counters["replays"] == 0
    recording.replay()
    assert rig.backend.counters["replays"] == 1


def test_splitting_ops_that_differ_from_those_of_the_warm_up_run_fail_the_capture(rig):
    runs = []

    def step(x):
        runs.append(1)
        out = torch.empty_like(x)
        return attend_fresh(x * 1) if len(runs) == 1 else (attend(x * 1, out), out)[1]

    with pytest.raises(CaptureFailed, match="attend is called where .* called attend_fresh"):
        rig.record(step, rig.rand(3))


def test_an_operation_in_place_on_a_bridge_runs_once_a_step(rig):
    @break_graph
    def between():
        pass

    def step(x):
        residual = x * 2
        between()
        return residual.add_(1)

    x = rig.rand(3)
    recording = rig.record(step, x)
    for _ in range(2):
        recording.replay()
        assert_close(recording.outputs, x * 2 + 1)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (torch.ops.aten.cumsum.default, "aten.cumsum.default"),
        (partial(partial(torch.cumsum), dim=0), "cumsum"),
        (torch.nn.Softmax(0), "Softmax"),
    ],
)
def test_eager_calls_have_readable_names(make_replay_rig, fn, name):
    call = break_graph(fn)
    args = (0,) if isinstance(fn, torch._ops.OpOverload) else ()
    recording = make_replay_rig().record(lambda x: call(x * 2, *args), torch.rand(3))
    assert recording.segments[1].copied == [name]


def test_an_eager_call_sees_what_the_graph_before_it_computed(rig):
    seen = []

    @break_graph
    def look(x):
        seen.append(x.tolist())

    x = rig.rand(2).fill_(3)

    def step(x):
        doubled = x * 2
        look(doubled)
        return doubled

    recording = rig.record(step, x)
    recording.replay()
    assert {tuple(values) for values in seen} == {(6, 6)}


def test_consecutive_splitting_calls_share_one_segment(rig):
    def step(x):
        out = torch.empty_like(x)
        attend(x, out)
        attend(out, out)
        return out + 1

    recording = rig.record(step, rig.rand(3))
    assert kinds(recording) == [EAGER, GRAPH]
    assert recording.segments[0].operations == 2


def test_views_and_unwritten_memory_make_no_graph(rig):
    def step(x):
        out = torch.empty_like(x[0])
        attend(x.view(2, 3).t()[:, 1], out)
        return out.view(3, 1)

    x = rig.rand(2, 3)
    recording = rig.record(step, x)
    assert kinds(recording) == [EAGER]
    x.copy_(rig.rand(2, 3))
    recording.replay()
    assert_close(recording.outputs[:, 0], x[1].cumsum(0))


@pytest.mark.parametrize("inference", [False, True])  # at the capture only
def test_failure_11_fresh_results_are_copied_to_where_the_next_graph_reads(rig, inference):
    def step(x):
        return attend_fresh(x * 2) + 1

    x = rig.rand(3)
    with torch.inference_mode(inference):
        recording = rig.record(step, x)
    for _ in range(3):
        x.copy_(rig.rand(3))
        recording.replay()
        assert_close(recording.outputs, (x * 2).cumsum(0) + 1)
    assert recording.segments[1].copied == ["attend_fresh"]
    event = rig.events.named("capture.recorded")[0]
    assert event.facts["copied_results"] == ["attend_fresh"]


def test_failure_11_a_result_the_op_keeps_for_itself_is_never_written(rig):
    pages = [rig.rand(3).fill_(1), rig.rand(3).fill_(2)]

    @break_graph
    def turn(x):
        pages.reverse()
        return pages[0]

    recording = rig.record(lambda x: turn(x * 1) + 0, rig.rand(3))
    for _ in range(3):
        recording.replay()
        assert torch.equal(recording.outputs, pages[0])
    assert sorted(page.tolist() for page in pages) == [[1] * 3, [2] * 3]


OTHER_FORMS = {
    "rows": lambda x: x[:1],
    "dtype": lambda x: x.double(),
    "dimensions": lambda x: x.sum(),
    "count": lambda x: (x, x),
    "nothing": lambda x: None,
    "dict": lambda x: {"x": x},
    "number": lambda x: 3,
    "text": lambda x: "text",
    "flag": lambda x: True,
    "number beside it": lambda x: [x, 4],
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_failure_11_a_result_of_another_form_is_an_error_not_a_broadcast(rig, form):
    """Of a tensor, and of what was first of that form, of which a number is in the graph."""
    other = OTHER_FORMS[form]
    for first, then in ((lambda x: x + 0, other), (other, lambda x: "another")):
        returned = [first]

        @break_graph
        def wayward(x):
            return returned[0](x * 1)  # noqa: B023

        def step(x):
            result = wayward(x * 1)
            return result + 1 if isinstance(result, torch.Tensor) else x * 2

        recording = rig.record(step, rig.rand(3, 4))
        recording.replay()
        returned[0] = then
        with pytest.raises(EagerResultChanged, match="wayward"):
            recording.replay()


def test_failure_11_a_result_that_leaves_its_argument_is_an_error(rig):
    fresh = []

    @break_graph
    def sometimes_in_place(x):
        return x + 1 if fresh else x.add_(1)

    recording = rig.record(lambda x: sometimes_in_place(x * 1) + 1, rig.rand(3))
    recording.replay()
    fresh.append(True)
    with pytest.raises(EagerResultChanged, match="sometimes_in_place"):
        recording.replay()


def test_a_result_that_is_an_argument_is_not_copied(rig):
    @break_graph
    def in_place(x):
        return x.add_(1)

    x = rig.rand(3)
    recording = rig.record(lambda x: in_place(x * 2) + 1, x)
    assert not recording.segments[1].copied
    x.copy_(rig.rand(3))
    recording.replay()
    assert_close(recording.outputs, x * 2 + 2)


def test_outputs_keep_their_form(rig):
    x = rig.rand(2)
    recording = rig.record(lambda x: {"a": (x + 1, None), "b": [x]}, x)
    assert recording.outputs["a"][1] is None
    assert recording.outputs["b"][0] is x


def test_failure_22_eager_calls_read_the_context_of_the_step_that_runs(rig):
    @break_graph
    def attend_by_metadata(q):
        return q * get_forward_context().metadata

    x = rig.rand(3)
    with forward_context(ForwardContext({}, metadata=2)):
        recording = rig.record(lambda x: attend_by_metadata(x + 1) - 1, x)
    for metadata in (3, 5):
        with forward_context(ForwardContext({}, metadata=metadata)):
            recording.replay()
        assert_close(recording.outputs, (x + 1) * metadata - 1)


def test_failure_23_a_host_decision_inside_a_graph_is_baked(rig):
    def split(x):
        return x * get_forward_context().num_tokens

    x = rig.rand(3)
    with forward_context(ForwardContext({}, num_tokens=8)):
        recording = rig.record(split, x, breaks=False)
    with forward_context(ForwardContext({}, num_tokens=1)):
        recording.replay()
    assert_close(recording.outputs, x * 8)


def test_a_splitting_call_inside_a_splitting_call_is_part_of_it(rig):
    @break_graph
    def outer(x):
        return attend_fresh(opaque_piece(torch.neg)(x))

    x = rig.rand(3)
    recording = rig.record(lambda x: outer(x * 2) + 1, x)
    assert kinds(recording) == [GRAPH, EAGER, GRAPH]
    x.copy_(rig.rand(3))
    recording.replay()
    assert_close(recording.outputs, (-2 * x).cumsum(0) + 1)


def test_recordings_do_not_nest(rig):
    inner = rig.record

    with pytest.raises(NestedCapture):
        rig.record(lambda x: inner(layers, x), rig.rand(3, 4))


def test_w2_one_function_serves_full_and_piecewise(rig):
    x = rig.rand(3, 4)
    recordings = [rig.record(layers, x, breaks=breaks) for breaks in (True, False, True)]
    piecewise = [GRAPH, EAGER, GRAPH, EAGER, GRAPH]
    assert [kinds(recording) for recording in recordings] == [piecewise, [GRAPH], piecewise]
    assert [len(recording.calls) for recording in recordings] == [5, 1, 5]
    for recording in [*recordings, *reversed(recordings)]:
        x.copy_(rig.rand(3, 4))
        recording.replay()
        assert_close(recording.outputs, layers_by_hand(x))


def test_w14_no_capture_outside_a_session(rig):
    with capture_session(rig.backend, rig.pool, rig.events) as session:
        pass
    with pytest.raises(CaptureFailed) as caught:
        record(layers, (rig.rand(3, 4),), session, name="late", breaks=True)
    assert isinstance(caught.value.__cause__, NoCaptureSession)


def test_a_released_recording_refuses_to_replay(rig):
    recording = rig.record(layers, rig.rand(3, 4))
    recording.release()
    recording.release()
    assert not found_by(recording.ownership)
    with pytest.raises(RecordingReleased, match="test"):
        recording.replay()


def test_two_threads_record_and_replay_independently(rig):

    def work(factor):
        with torch.no_grad():
            x = rig.rand(3, 4)
            pool = rig.backend.new_pool()
            for _ in range(5):
                with capture_session(rig.backend, pool, rig.events) as session:
                    recording = record(
                        lambda y: layers(y) * factor, (x,), session, name="t", breaks=True
                    )
                x.copy_(rig.rand(3, 4))
                recording.replay()
                assert_close(recording.outputs, layers_by_hand(x) * factor)

    at_once(work, (2.0, 3.0))


def test_facts_of_a_recording_are_reported(rig):
    recording = rig.record(layers, rig.rand(3, 4))
    (event,) = rig.events.named("capture.recorded")
    assert event.facts["segments"] == 5
    assert event.facts["operations"] == recording.operations >= 6
    assert recording.seconds > 0
