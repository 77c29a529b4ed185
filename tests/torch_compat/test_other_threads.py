"""What a thread that traces changes in torch is not seen by another one, which stops it midway."""

import os
import random
import signal
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import _symbolic_trace as symbolic_trace

from piecegraph.torch_compat.tracing import other_threads
from piecegraph.torch_compat.tracing.dynamo import dynamo_tracing
from piecegraph.torch_compat.tracing.other_threads import keep_device_guard, unseen_by_other_threads
from tests.processes import in_a_thread


class Midway:
    """Lets the test's thread act while another one is in the middle of its work."""

    def __init__(self):
        self._reached, self._go_on = threading.Event(), threading.Event()

    def stop_here(self):
        self._reached.set()
        assert self._go_on.wait(300)

    @contextmanager
    def of(self, work):
        """`work` runs in a thread, and is at `stop_here` inside the block."""
        thread = threading.Thread(target=work)
        thread.start()
        assert self._reached.wait(300)
        try:
            yield
        finally:
            self._go_on.set()
            thread.join()


def test_a_module_that_another_thread_calls_is_not_traced():
    midway, graphs = Midway(), []

    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            midway.stop_here()
            return self.inner(x) * self.inner.weight

    def trace():
        with unseen_by_other_threads():
            graphs.append(torch.fx.symbolic_trace(Traced()).graph)

    served, x = nn.Linear(2, 2), torch.ones(1, 2)
    expected = served(x)
    with midway.of(trace):
        assert torch.equal(served(x), expected)
    assert [n.op for n in graphs[0].nodes if n.name.startswith("inner")] == [
        "call_module",
        "get_attr",
    ]


def test_what_another_thread_has_compiled_runs_beside_a_trace(monkeypatch):
    """Torch raises in calls of compiled functions while its symbolic tracer runs in any thread."""
    monkeypatch.setattr(other_threads, "OTHER_TRACER_S", 600.0)
    midway, compiled = Midway(), torch.compile(torch.neg, backend="eager")

    def stops(x):
        midway.stop_here()
        return x + 1

    def trace():
        with unseen_by_other_threads():
            torch.fx.symbolic_trace(stops)

    with midway.of(trace):
        assert torch.equal(compiled(torch.ones(3)), -torch.ones(3))
        if not (child := os.fork()):
            signal.alarm(30)  # that thread is not in it
            os._exit(len(torch.fx.symbolic_trace(nn.ReLU()).graph.nodes))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.parametrize("first", ["own", "other"])
def test_two_tracers_run_one_after_the_other(first):
    """Each puts back what it found: what the other one had replaced would stay."""
    graphs, before = [], (nn.Module.__call__, nn.Module.__getattr__)

    class Traced(nn.Module):
        def __init__(self, begins):
            super().__init__()
            self.inner, self.begins = nn.Linear(2, 2), begins

        def forward(self, x):
            self.begins()
            time.sleep(0.1)
            return self.inner(x)

    def trace(begins):
        graphs.append(torch.fx.symbolic_trace(Traced(begins)).graph)

    def hidden(begins):
        with unseen_by_other_threads():
            trace(begins)

    second, (earlier, later) = [], (hidden, trace) if first == "own" else (trace, hidden)

    def start_second():
        second.append(threading.Thread(target=later, args=[lambda: None]))
        second[0].start()

    earlier(start_second)
    second[0].join()
    assert [[node.op for node in graph.nodes][1] for graph in graphs] == ["call_module"] * 2
    assert (nn.Module.__call__, nn.Module.__getattr__) == before
    assert torch.equal(torch.compile(torch.neg, backend="eager")(torch.ones(3)), -torch.ones(3))


@pytest.fixture
def traced_midway():
    """A trace that stops in the fake implementation of an op."""
    midway = Midway()

    def fake(x):
        midway.stop_here()
        return torch.empty_like(x)

    library = torch.library.Library("other_threads_tests", "FRAGMENT")
    library.define("wait(Tensor x) -> Tensor")
    library.impl("wait", torch.clone, "CPU")
    torch.library.register_fake("other_threads_tests::wait", fake, lib=library)

    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        return torch.ops.other_threads_tests.wait(x) + 1

    def trace():
        with unseen_by_other_threads(), dynamo_tracing("backed"):
            function(torch.ones(2))

    yield midway, trace
    library._destroy()


def test_random_numbers_are_not_drawn_again(traced_midway):
    midway, trace = traced_midway
    torch.manual_seed(0)
    expected = torch.rand(8)
    torch.manual_seed(0)
    numbers = random.Random(0)
    random.seed(0)
    with midway.of(trace):
        first = torch.rand(4)
        assert random.random() == numbers.random()
    assert torch.equal(torch.cat([first, torch.rand(4)]), expected)
    assert random.random() == numbers.random()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_settings_of_another_thread_stay(traced_midway):
    """Dynamo refuses such a trace: "Global state changed"."""
    midway, trace = traced_midway
    try:
        with midway.of(trace):
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
        assert torch.get_default_dtype() is torch.float64
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_a_device_guard_that_is_kept_serves_fake_tensors_after_a_thread_has_ended():
    keep_device_guard()

    def trace():
        with FakeTensorMode() as mode:
            return (mode.from_tensor(torch.ones(3)) * 2).shape

    assert [in_a_thread(trace) for _ in range(2)] == [(3,), (3,)]


def test_what_another_tracer_replaced_does_not_come_back():
    """Dynamo takes it back, and puts it there again after that tracer has ended."""
    midway, before = Midway(), (nn.Module.__call__, nn.Module.__getattr__)

    def trace():
        with unseen_by_other_threads(), symbolic_trace._maybe_revert_all_patches():
            midway.stop_here()

    class Traced(nn.Module):
        def forward(self, x):
            midway_through.enter_context(midway.of(trace))
            return x

    with ExitStack() as midway_through:
        torch.fx.symbolic_trace(Traced())
    assert (nn.Module.__call__, nn.Module.__getattr__) == before
