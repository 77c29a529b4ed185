"""Random number generators beside a trace in another thread."""

from __future__ import annotations

import threading

import torch

from piecegraph.torch_compat.tracing.generators import generators_left_alone


def test_only_the_thread_that_traces_sets_no_state() -> None:
    before = torch.random.set_rng_state
    torch.manual_seed(0)
    start, entered, left = torch.get_rng_state(), threading.Event(), threading.Event()

    def trace() -> None:
        with generators_left_alone():
            torch.random.set_rng_state(start)
            entered.set()
            left.wait(60)

    first = torch.rand(1)
    thread = threading.Thread(target=trace)
    thread.start()
    entered.wait(60)
    assert not torch.equal(torch.rand(1), first)
    torch.random.set_rng_state(start)
    assert torch.equal(torch.rand(1), first)
    left.set()
    thread.join()
    assert torch.random.set_rng_state is before
