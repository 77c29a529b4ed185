"""Regions that a model compiles itself with `torch.compile`, in code that is not traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..basics.patch import replaced
from .partition import code_run_by


@contextmanager
def regions_noted(note: Callable[[], object]) -> Iterator[None]:
    """Call `note` where a thread enters a region, of any backend of `torch.compile`."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    if module is None:
        yield
        return
    original: Any = module._callback_from_stance

    def entered(callback: Any) -> Any:
        if callback:
            note()
        return original(callback)

    with replaced(module, "_callback_from_stance", entered):
        yield


@contextmanager
def regions_through(hook: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Call `hook(code)` in place of each code of Inductor: no dispatch mode sees what it runs."""

    def run(original: Callable[..., Any], graph: Any, args: Any) -> Any:
        """On a copy of the list: the code empties it, and a replay passes it again."""
        return hook(lambda args: original(graph, list(args)))(args)

    with code_run_by(run):
        yield
