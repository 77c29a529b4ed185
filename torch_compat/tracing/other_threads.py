"""Keeps from other threads what a trace or a compile changes in the whole process.

A model may be traced in one thread while others serve it, or build another model.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace

from ..basics.patch import preserve_cache_variables, replaced


@contextmanager
def unseen_by_other_threads() -> Iterator[None]:
    """Trace and compile inside. What this thread changes in torch itself, other threads never see.

    Dynamo saves settings and states of random number generators before a trace and sets them after
    it (`preserve_global_state` in `torch/_dynamo/convert_frame.py`). What another thread has set
    meanwhile would be lost, and random numbers that it has drawn would come again. A trace changes
    none of them, so this thread sets none.

    Torch's symbolic tracer replaces `Module.__call__` and `Module.__getattr__` while it runs, and
    code generation uses it. A module that another thread calls meanwhile would be traced.
    """
    thread = threading.get_ident()

    def ignored_here(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(*args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() == thread else original(*args, **kwargs)

        return set_state

    with ExitStack() as stack:
        _remember_functions()
        for owner, name in (
            (random, "setstate"),  # torch 2.11
            (torch.random, "set_rng_state"),
            (torch.cuda, "set_rng_state"),
            (torch, "set_default_dtype"),
            (torch, "use_deterministic_algorithms"),
        ):
            stack.enter_context(replaced(owner, name, ignored_here(getattr(owner, name))))
        patch = _patch_for_one_thread(thread)
        stack.enter_context(replaced(symbolic_trace._Patcher, "patch_method", patch))
        yield


def keep_device_guard() -> None:
    """Let the device guard of fake tensors be of this thread, which goes on after a trace.

    With torch 2.11 for CUDA, on a machine without a device, it ends with the thread that made the
    first fake tensor, and the next fake tensor ends the process.
    """
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def _remember_functions() -> None:
    """Let Dynamo make its table of torch's functions before some of them are replaced."""
    with preserve_cache_variables():
        from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map()


def _patch_for_one_thread(thread: int) -> Callable[..., None]:
    """The method by which the symbolic tracer replaces methods, for those of `thread` alone."""
    original = symbolic_trace._Patcher.patch_method

    def patch_method(self: Any, cls: type, name: str, new: Any, deduplicate: bool = True) -> None:
        before = getattr(cls, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == thread else before)(*args, **kwargs)

        original(self, cls, name, method if threading.get_ident() == thread else new, deduplicate)

    return patch_method
