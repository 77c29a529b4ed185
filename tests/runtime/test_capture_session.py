"""A session prepares once, pauses garbage collection, and restores everything."""

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from piecegraph.errors import NoCaptureSession
from piecegraph.runtime.backends.ownership import Ownership
from piecegraph.runtime.capture.recorder import record
from piecegraph.runtime.capture.session import capture_failure, capture_session


def test_w3_a_session_prepares_once_for_many_captures(make_replay_rig):
    rig = make_replay_rig()
    with capture_session(rig.backend, rig.pool, rig.events) as session:
        for size in (3, 2, 1):
            record(torch.neg, (torch.ones(size),), session, name="n", breaks=False)
    assert rig.backend.counters["preparations"] == 1
    assert rig.backend.counters["captures"] == 3


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_is_not_collected_inside_and_then_as_before(rig, is_on):
    if not is_on:
        gc.disable()
    try:
        with capture_session(rig.backend, rig.pool, rig.events):
            assert not gc.isenabled()
        assert gc.isenabled() == is_on
    finally:
        gc.enable()


def test_an_error_inside_closes_the_session(rig):
    with pytest.raises(ValueError, match="mine"):
        with capture_session(rig.backend, rig.pool, rig.events) as session:
            raise ValueError("mine")
    assert gc.isenabled()
    with pytest.raises(NoCaptureSession):
        session.begin(Ownership())


def test_sessions_of_two_threads_take_turns(make_replay_rig):
    rig = make_replay_rig()
    inside = []

    def other():
        with capture_session(rig.backend, rig.pool, rig.events, prepare=False):
            inside.append("other")

    with capture_session(rig.backend, rig.pool, rig.events, prepare=False):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.05)
        inside.append("first")
    thread.join()
    assert inside == ["first", "other"]
    assert gc.isenabled()


def test_a_failure_in_a_library_says_where_it_was_raised():
    with ThreadPoolExecutor() as pool:
        error = pool.submit(json.loads, "{").exception()  # no line of this file is on the way
    assert f"raised at {json.decoder.__file__}:" in str(capture_failure(error, "FULL 8"))
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert "raised at" not in str(failure := capture_failure(caught.value, "FULL 8"))
    assert f"{__file__}:" in str(failure)
