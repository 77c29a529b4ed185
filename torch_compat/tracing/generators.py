"""Random number generators beside a trace in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..basics.patch import replaced


@contextmanager
def generators_left_alone() -> Iterator[None]:
    """In this thread, states of torch's generators are not set.

    Dynamo saves them before a trace and sets them after it (`preserve_global_state` in
    `torch/_dynamo/convert_frame.py`). Other threads draw numbers meanwhile, and would draw the same
    ones again. A trace itself draws none.
    """
    thread = threading.get_ident()

    def left_alone(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(*args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() == thread else original(*args, **kwargs)

        return set_state

    with ExitStack() as stack:
        for owner in (torch.random, torch.cuda):
            setter = left_alone(owner.set_rng_state)
            stack.enter_context(replaced(owner, "set_rng_state", setter))
        yield
