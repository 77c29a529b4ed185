"""State of torch that is process-wide: one lock, cache variables, temporary replacements."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

_lock = threading.RLock()

FORK_S = 30.0
"""How long a fork waits until no thread is inside of a compiler: its locks and half of its work
would stay in the child for ever."""


@contextmanager
def compiler_lock() -> Iterator[None]:
    """Only one thread may be inside: Dynamo and Inductor keep process-wide state while they run.

    Dynamo's own lock comes first, since it is held where `torch.compile` calls a backend.
    """
    with dynamo_lock(), _lock:
        yield


def somebody_compiles() -> bool:
    """Whether another thread is inside of `compiler_lock`."""
    free = _lock.acquire(blocking=False)
    if free:
        _lock.release()
    return not free


@contextmanager
def preserve_cache_variables() -> Iterator[None]:
    """Restore the environment variables of torch's cache directories, which torch itself sets.

    Torch sets them when Dynamo is imported and when a file is named. Only one thread is inside at a
    time, so no thread sees the value that another one set for a compile, and no other code of the
    process compiles at the same time.
    """
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with compiler_lock():
        before = {name: os.environ.get(name) for name in names}
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def dynamo_lock() -> AbstractContextManager[Any]:
    """The lock that `torch.compile` holds while it compiles; a no-op before Dynamo is imported."""
    first: AbstractContextManager[Any] = _compiler_locks()[0]
    return nullcontext() if first is _lock else first


def _before_fork() -> None:
    for lock in _compiler_locks():
        lock.acquire(timeout=FORK_S)


def _after_fork(in_child: bool) -> None:
    for lock in _compiler_locks():
        try:
            lock.release()
        except RuntimeError:  # it was not free in time
            if in_child:
                lock._at_fork_reinit()


def _compiler_locks() -> list[Any]:
    module = sys.modules.get("torch._dynamo.convert_frame")
    return [lock for lock in (getattr(module, "compile_lock", None), _lock) if lock is not None]


os.register_at_fork(
    before=_before_fork,
    after_in_parent=partial(_after_fork, False),
    after_in_child=partial(_after_fork, True),
)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
