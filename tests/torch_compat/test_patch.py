"""Process-wide state of torch: the lock, cache variables, replacements."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext

import pytest

from piecegraph.torch_compat.basics import patch

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def test_nobody_compiles_beside_us():
    """torch.compile in another thread holds Dynamo's lock, and its compilers keep global state."""
    from torch._dynamo.convert_frame import compile_lock

    inside = threading.Event()

    def enter() -> None:
        with patch.preserve_cache_variables():
            inside.set()

    thread = threading.Thread(target=enter)
    with compile_lock:
        thread.start()
        assert not inside.wait(0.2)
    assert inside.wait(10)
    thread.join()


def test_the_lock_is_dynamos_own():
    from torch._dynamo.convert_frame import compile_lock

    assert patch.dynamo_lock() is compile_lock


def test_replaced_attributes_come_back_as_they_were():
    class Owner:
        @classmethod
        def name(cls) -> str:
            return "original"

    before = vars(Owner)["name"]

    def fail_inside() -> None:
        with patch.replaced(Owner, "name", lambda: "other"):
            assert Owner.name() == "other"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert vars(Owner)["name"] is before


def test_cache_variables_set_inside_are_gone(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with patch.preserve_cache_variables():
        for name in NAMES:
            os.environ[name] = "/set by torch"
    assert not any(name in os.environ for name in NAMES)


def test_compiler_lock_takes_the_lock_of_dynamo_first():
    """A thread in `torch.compile` holds Dynamo's lock and takes ours in a backend."""
    from torch._dynamo.convert_frame import compile_lock

    waiting, inside = threading.Event(), threading.Event()

    def enter() -> None:
        waiting.set()
        with patch.compiler_lock():
            inside.set()

    thread = threading.Thread(target=enter)
    with compile_lock:
        thread.start()
        assert waiting.wait(10)
        with patch.compiler_lock():
            assert not inside.is_set()
    assert inside.wait(10)
    thread.join()


def test_somebody_who_compiles_is_seen_from_another_thread():
    seen: list[bool] = []

    def look() -> None:
        seen.append(patch.somebody_compiles())

    for inside in (patch.compiler_lock(), nullcontext()):
        with inside:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
    assert seen == [True, False]
