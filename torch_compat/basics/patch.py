"""State of torch that is process-wide: one lock, cache variables, modes, temporary replacements."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import filelock  # noqa: F401  # Inductor imports it in our thread; its hooks of forks come in pairs
import torch

_lock = threading.RLock()
_changing_modes = threading.Lock()

EXPORT_MODES = "mode_stack_state_for_pre_dispatch"
"""In `torch._ops`: gives the modes of `torch.export`. Torch keeps one stack for all threads."""

CACHE_VARIABLES = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"

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
    with compiler_lock():
        before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


class _UnlistedVariables(os._Environ[str]):
    """`os.environ` in which `unlisted` are read and set by name, by whichever thread. No process
    that is started meanwhile inherits them; one that gets a copy of all variables has neither these
    nor those of the same name."""

    def __init__(self, shared: os._Environ[str], unlisted: dict[str, str]) -> None:
        vars(self).update(vars(shared))  # its data, too
        self.unlisted = unlisted

    def __getitem__(self, name: str) -> str:
        return self.unlisted[name] if name in self.unlisted else super().__getitem__(name)

    def __setitem__(self, name: str, value: str) -> None:
        if name in CACHE_VARIABLES:
            self.unlisted[name] = value
        else:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name in CACHE_VARIABLES:
            del self.unlisted[name]
        else:
            super().__delitem__(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if name not in self.unlisted)

    def __len__(self) -> int:
        return sum(1 for _ in self)  # who starts a program counts them, and then lists them


@contextmanager
def cache_variables(**values: str) -> Iterator[None]:
    """Give torch its cache directories as if they were environment variables.

    Its code reads them by name (`torch._inductor.runtime.cache_dir_utils`), and so does Triton's.
    """
    with compiler_lock(), replaced(os, "environ", _UnlistedVariables(os.environ, values)):
        yield


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
    locks = getattr(module, "compile_lock", None), _lock, _changing_modes
    return [lock for lock in locks if lock is not None]


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


def with_globals(function: Any, names: dict[str, Any]) -> FunctionType:
    """A function that reads and writes `names` where `function` does its globals."""
    code, defaults = function.__code__, function.__defaults__
    made = FunctionType(code, names, function.__name__, defaults, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class _OfEachThread:
    """A stack for each thread of `own`, and the one of torch for all others."""

    def __init__(self, shared: Any) -> None:
        self.shared = shared
        self.own: dict[int, Any] = {}

    def __call__(self) -> Any:
        return self.own.get(threading.get_ident()) or self.shared()


@contextmanager
def own_export_modes() -> Iterator[None]:
    """Let this thread see no mode of a `torch.export` in another thread.

    Each operation on a symbolic size takes such a mode away for its time, and is a node of the
    graph that the other thread exports. Torch prints a tensor in the same way.
    """
    thread, of_torch = threading.get_ident(), torch._ops
    if thread in getattr(getattr(of_torch, EXPORT_MODES), "own", ()):
        yield
        return
    with _changing_modes:
        stack = getattr(of_torch, EXPORT_MODES)
        if not isinstance(stack, _OfEachThread):
            stack = _OfEachThread(stack)
            setattr(of_torch, EXPORT_MODES, stack)
        stack.own[thread] = type(stack.shared())()
    try:
        yield
    finally:
        with _changing_modes:
            del stack.own[thread]
            if not stack.own:
                setattr(of_torch, EXPORT_MODES, stack.shared)
