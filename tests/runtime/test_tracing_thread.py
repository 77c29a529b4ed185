"""A thread that is stopped ends at its next checkpoint, and leaves the process as it was."""

import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

from piecegraph.runtime.parts.starts import tracing_thread
from piecegraph.runtime.parts.starts.tracing_thread import TracingThread


class Halfway:
    """What the thread waits for: `inside` is set by it, `go_on` by the test."""

    def __init__(self):
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.put_back = []

    @contextmanager
    def replaced(self):
        try:
            yield
        finally:
            self.inside.set()
            assert self.go_on.wait(300)
            self.put_back.append("all of it")


@pytest.fixture
def step():
    test = Halfway()
    yield test
    test.go_on.set()


def ended(*thread):
    """A thread of these arguments that has ended."""
    thread = TracingThread(*thread)
    thread.start()
    assert thread.join(300)
    return thread


def test_what_was_replaced_is_put_back(step):
    """Between two checkpoints nothing ends the work, wherever it is."""
    before, after = sys.getswitchinterval(), list[str]()

    def work():
        with step.replaced():
            pass
        thread.checkpoint()
        after.append("the checkpoint")

    thread = TracingThread("test", work, str)
    thread.start()
    assert step.inside.wait(300)
    thread.stop()
    assert not thread.join(0.05)
    step.go_on.set()
    assert thread.join(300)
    assert step.put_back == ["all of it"]
    assert not after
    assert sys.getswitchinterval() == before


def test_one_that_waits_for_another_does_not_begin_after_it_was_stopped(step):
    begun = []

    def work():
        with step.replaced():
            pass

    first = TracingThread("first", work, str)
    second = TracingThread("second", lambda: begun.append("second"), str)
    first.start()
    assert step.inside.wait(300)
    second.start()
    second.stop()
    step.go_on.set()
    assert first.join(300)
    assert second.join(300)
    assert not begun


def test_what_cannot_begin_has_failed(monkeypatch):
    def fail():
        raise KeyError("torch._dynamo")

    monkeypatch.setattr(tracing_thread, "unseen_by_other_threads", fail)
    thread = ended("test", lambda: "", str)
    assert thread.is_over() == (True, False)
    assert thread.failure == "'torch._dynamo'"


def test_what_is_found_during_an_exchange_is_told_at_the_next(step):
    def work():
        with step.replaced():
            pass
        return "a difference"

    def exchange(topic, own):
        step.go_on.set()
        assert thread.join(300)
        return [own, {"ended": True, "failure": "", "expired": False}]

    thread = TracingThread("test", work, str, exchange)
    thread.start()
    assert thread.is_over() == (False, False)
    assert thread.is_over() == (True, False)
    assert thread.failure == "rank 0: a difference"


def test_the_default_device_is_that_of_the_thread_that_starts_it():
    seen = []
    with torch.device("meta"):
        thread = TracingThread("test", lambda: seen.append(torch.empty(1).device.type), str)
    thread.start()
    assert thread.join(300)
    assert seen == ["meta"]
    assert torch.empty(1).device.type == "cpu"


def test_the_settings_of_autocast_are_those_of_the_thread_that_starts_it():
    """A trace with the defaults found no difference to a bundle that was made with them."""

    def settings():
        return torch.is_autocast_cache_enabled(), torch.get_autocast_dtype("cpu")

    seen = []
    before = settings()
    try:
        torch.set_autocast_cache_enabled(False)
        torch.set_autocast_dtype("cpu", torch.float16)
        thread = TracingThread("test", lambda: seen.append(settings()), str)
    finally:
        torch.set_autocast_cache_enabled(before[0])
        torch.set_autocast_dtype("cpu", before[1])
    thread.start()
    assert thread.join(300)
    assert seen == [(False, torch.float16)]
    assert settings() == before


PROGRAM = """
import threading, sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from piecegraph.runtime.parts.starts.tracing_thread import TracingThread
torch.set_num_threads(1)

def traces():
    with FakeTensorMode() as mode:
        mode.from_tensor(torch.ones(3)) * 2
    return "traced"

for _ in range(2):
    thread = TracingThread("test", traces, str)
    thread.start()
    assert thread.join(300) and thread.is_over() and thread.failure == "traced"

begun = threading.Event()
def work():
    begun.set()
    while True:
        thread.checkpoint()
        for _ in range(200):
            torch.ones(64, 64) + 1
class EndsSlowly:
    def __del__(self):
        for _ in range(3_000_000):
            pass
sys.ends_slowly = EndsSlowly()
thread = TracingThread("test", work, str)
thread.start()
begun.wait()
"""


@pytest.mark.slow
def test_threads_end_and_an_interpreter_ends_while_one_is_in_torch():
    """Torch 2.11 for CUDA, without a device, ended the process at a second trace: a guard ended
    with the first thread. A daemon that torch lets go on after the interpreter aborts it."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")
