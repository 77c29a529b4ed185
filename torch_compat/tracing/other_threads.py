"""Keeps from other threads what a trace or a compile changes in the whole process.

A model may be traced in one thread while others serve it, or build another model.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from inspect import unwrap
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace

from ..basics.patch import own_export_modes, replaced, somebody_compiles, with_globals
from ..basics.settings import global_state

REVERT = "_maybe_revert_all_patches"
"""Of the symbolic tracer, whichever thread it runs in; not in each version of torch."""

OTHER_TRACER_S = 20.0
"""How long a symbolic trace waits for one of another thread to end."""


@contextmanager
def unseen_by_other_threads() -> Iterator[list[str]]:
    """Trace and compile inside. What this thread changes in torch itself, other threads never see.

    Gives what others change while this thread is inside of a compiler of torch: settings, also
    those that are as before again, and methods of `Module`, which their symbolic tracers replace.

    Dynamo saves settings and states of random number generators before a trace and sets them after
    it (`preserve_global_state` in `torch/_dynamo/convert_frame.py`). What another thread has set
    meanwhile would be lost, and random numbers that it has drawn would come again. A trace changes
    none of them, so this thread sets none.

    Torch's symbolic tracer replaces `Module.__call__` and `Module.__getattr__` while it runs, and
    code generation uses it. A module that another thread calls meanwhile would be traced. Dynamo
    takes back what such a tracer has replaced, and puts it there again after the trace: that of
    another thread, which may have ended since, would stay for good. Modes of `torch.export` are of
    the whole process, too: see `own_export_modes`.
    """
    thread, changes = threading.get_ident(), list[str]()

    def ignored_here(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                return None
            before = global_state()
            result = original(*args, **kwargs)
            if (now := global_state()) != before and somebody_compiles():
                changes.extend(name for name in now if now[name] != before.get(name))
            return result

        return set_state

    def only_there() -> AbstractContextManager[Any]:
        return nullcontext() if threading.get_ident() == thread else revert()

    revert: Any = getattr(symbolic_trace, REVERT, None)
    setters = [
        (random, "setstate"),  # torch 2.11
        (torch.random, "set_rng_state"),
        (torch.cuda, "set_rng_state"),
        (torch, "set_default_dtype"),
        (torch, "use_deterministic_algorithms"),
    ]
    replacements: list[tuple[Any, str, Any]] = [
        *((owner, name, ignored_here(getattr(owner, name))) for owner, name in setters),
        (symbolic_trace._Patcher, "patch_method", _patch_for_one_thread(thread, changes)),
        (torch.fx.Tracer, "trace", _trace_of_one_thread(thread)),
        *([(symbolic_trace, REVERT, only_there)] if revert is not None else []),
    ]
    with ExitStack() as stack:
        stack.enter_context(own_export_modes())
        for replacement in replacements:
            stack.enter_context(replaced(*replacement))
        yield changes


def keep_device_guard() -> None:
    """Let the device guard of fake tensors be of this thread, which goes on after a trace.

    With torch 2.11 for CUDA, on a machine without a device, it ends with the thread that made the
    first fake tensor, and the next fake tensor ends the process.
    """
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def _patch_for_one_thread(thread: int, changes: list[str]) -> Callable[..., None]:
    """The method by which the symbolic tracer replaces methods, for those of `thread` alone."""
    original = symbolic_trace._Patcher.patch_method

    def patch_method(self: Any, cls: type, name: str, new: Any, deduplicate: bool = True) -> None:
        before = getattr(cls, name)

        @wraps(before)
        def method(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == thread else before)(*args, **kwargs)

        ours = threading.get_ident() == thread
        if not ours and somebody_compiles():
            changes.append(f"{cls.__name__}.{name}")
        original(self, cls, name, method if ours else new, deduplicate)

    return patch_method


def _trace_of_one_thread(thread: int) -> Callable[..., Any]:
    """`Tracer.trace`, which in `thread` runs beside that of no other thread: each puts back the
    methods of `Module` that it found. There it also has globals of its own: by the others torch
    raises in each call of a compiled function, whichever thread makes it."""
    original, alone, process = torch.fx.Tracer.trace, threading.RLock(), os.getpid()
    names = {**vars(symbolic_trace)}
    new_patcher = with_globals(unwrap(symbolic_trace._new_patcher), names)
    names[new_patcher.__name__] = contextmanager(new_patcher)
    disable: Any = torch.compiler.disable
    own = disable(with_globals(unwrap(original), names))

    def trace(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() != process:  # a fork has the lock and not the thread that holds it
            return original(*args, **kwargs)
        held = alone.acquire(timeout=OTHER_TRACER_S)
        try:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            end = time.monotonic() + OTHER_TRACER_S
            while symbolic_trace._is_fx_tracing_flag and time.monotonic() < end:  # began before
                time.sleep(0.001)
            return own(*args, **kwargs)
        finally:
            if held:
                alone.release()

    return trace
