"""After a failure no capture is open, nothing is kept, and the next capture works."""

import gc

import pytest
import torch
from torch.testing import assert_close

from piecegraph.errors import CaptureFailed
from piecegraph.runtime.capture.breaks import break_graph, opaque_piece


@break_graph
def attend(q):
    return q.cumsum(0)


def step(x):
    return attend(x * 2) + 1


def assert_serving(rig):
    """A new recording works, and plain calls are not recorded."""
    x = rig.rand(3)
    recording = rig.record(step, x)
    x.copy_(rig.rand(3))
    recording.replay()
    assert_close(recording.outputs, (x * 2).cumsum(0) + 1)
    assert gc.isenabled()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def raises_in_the_capture():
    """A function that raises at its second call, the first of which is in the warm-up run."""
    calls = []

    def raising(x):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("no such layer")
        return x + 0

    return raising


def as_it_is(fn):
    return fn


@pytest.mark.parametrize("kind", [as_it_is, break_graph, opaque_piece])
def test_w23_an_error_while_capturing_leaves_nothing_open(rig, kind):
    if kind is break_graph and not rig.backend.runs_python:
        return  # a capture on a device runs no splitting op
    state, raising = rig.rand(3).zero_(), kind(raises_in_the_capture())

    def broken(x):
        y = attend(x * 2)
        state.add_(y)
        return raising(y * 2)

    with pytest.raises(CaptureFailed, match="test failed: ValueError: no such layer") as caught:
        rig.record(broken, rig.rand(3))
    assert isinstance(caught.value.__cause__, ValueError)
    assert_serving(rig)


def test_what_the_failed_graph_wrote_is_restored(make_replay_rig):
    state, raising = torch.zeros(3), raises_in_the_capture()

    def broken(x):
        state.add_(x)
        return raising(x)

    with pytest.raises(CaptureFailed):
        make_replay_rig().record(broken, torch.ones(3))
    assert state.tolist() == [1, 1, 1]  # by the warm-up run


def test_an_interrupt_passes_unchanged_and_cleans_up(rig):
    def interrupted(x):
        x = attend(x * 2) * 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rig.record(interrupted, rig.rand(3))
    assert_serving(rig)


def test_failure_34_the_pool_survives_a_failed_first_capture(rig):
    kept, raising = [], raises_in_the_capture()

    def broken(x):
        kept.append(x * 2)
        return raising(x)

    with pytest.raises(CaptureFailed):
        rig.record(broken, rig.rand(3))
    assert_serving(rig)


def test_a_failure_releases_the_memory_of_the_segments_before_it(make_replay_rig):
    rig, raising = make_replay_rig(), break_graph(raises_in_the_capture())
    with pytest.raises(CaptureFailed) as caught:
        rig.record(lambda x: raising(x * 2), torch.rand(100))
    assert rig.backend.memory().used == 0
    assert caught.value.__cause__ is not None  # whose traceback still holds the frames
