"""A thread that is stopped ends where it leaves the process as it was."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from piecegraph.runtime import tracing_thread
from piecegraph.runtime.tracing_thread import TracingThread

SLOW = """
import sys, test_of_tracing_thread as test
test.inside.set()
while not test.go_on.is_set():
    pass
complete = True
"""


class Halfway:
    """What the thread waits for: `inside` is set by it, `go_on` by the test."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def work(self) -> None:
        self.inside.set()
        while not self.go_on.is_set():
            pass


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Halfway]:
    monkeypatch.setattr(tracing_thread, "END_S", 0.05)
    test = Halfway()
    yield test
    test.go_on.set()


def ends(thread: TracingThread, step: Halfway) -> None:
    """Stop `thread` while it is inside; it goes on until it may end."""
    thread.start()
    assert step.inside.wait(60)
    thread.stop()
    assert not thread.join(0.05)
    step.go_on.set()
    assert thread.join(60)


def test_an_import_is_completed(
    step: Halfway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "imported_slowly.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "test_of_tracing_thread", step)  # type: ignore[arg-type]
    after: list[str] = []

    def work() -> None:
        importlib.import_module("imported_slowly")
        while True:
            after[:] = ["the import"]

    ends(TracingThread("test", work), step)
    assert sys.modules.pop("imported_slowly").complete


def test_what_was_replaced_is_put_back(step: Halfway) -> None:
    put_back: list[str] = []

    @contextmanager
    def replaced() -> Iterator[None]:
        yield
        step.work()
        put_back.append("all of it")

    def work() -> None:
        with replaced():
            pass
        while True:
            pass

    ends(TracingThread("test", work), step)
    assert put_back == ["all of it"]


def test_else_it_ends_at_once(step: Halfway) -> None:
    before = sys.getswitchinterval()
    thread = TracingThread("test", step.work)
    thread.start()
    assert step.inside.wait(60)
    thread.stop()
    assert thread.join(60)
    assert not step.go_on.is_set()
    assert sys.getswitchinterval() == before


def test_thread_that_loses_what_ends_it_is_told_again(
    step: Halfway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what is raised in a finalizer."""
    monkeypatch.setattr(tracing_thread, "AGAIN_S", 0.05)

    class Loses:
        def __del__(self) -> None:
            step.work()

    def work() -> None:
        lost = Loses()
        del lost
        step.go_on.clear()
        step.work()

    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: step.go_on.set())
    thread = TracingThread("test", work)
    thread.start()
    assert step.inside.wait(60)
    thread.stop()
    assert thread.join(60)
    assert not step.go_on.is_set()


def test_another_thread_with_the_number_of_one_that_ended_goes_on(
    step: Halfway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_alive` says yes for a moment while another thread asks, too."""
    step.go_on.set()
    thread = TracingThread("test", step.work)
    thread.start()
    assert thread.join(60)
    monkeypatch.setattr(thread._thread, "is_alive", lambda: True)
    monkeypatch.setattr(thread._thread, "_ident", threading.get_ident())
    thread.stop()
    for _ in range(1000):  # where an exception for this thread would be raised
        step.work()


def test_the_default_device_is_that_of_the_thread_that_starts_it() -> None:
    seen: list[str] = []
    with torch.device("meta"):
        thread = TracingThread("test", lambda: seen.append(torch.empty(1).device.type))
    thread.start()
    assert thread.join(60)
    assert seen == ["meta"]
    assert torch.empty(1).device.type == "cpu"
