"""Work that must not happen after `seal()`, and the mark of what may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

_ALLOWED: ContextVar[bool] = ContextVar("piecegraph_compilation_allowed", default=False)


class WorkKind(StrEnum):
    """Work that must not happen after `seal()`."""

    TRACE = "Dynamo trace"
    RECOMPILE = "Dynamo recompile"
    INDUCTOR = "Inductor compile"
    AUTOTUNING = "autotuning"
    TRITON = "Triton compile"
    CAPTURE = "unplanned capture"


@contextmanager
def allow_compilation() -> Iterator[None]:
    """Compiling and capturing inside the block is no violation of `seal()`."""
    token = _ALLOWED.set(True)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def is_compilation_allowed() -> bool:
    """Whether the calling thread is inside `allow_compilation`."""
    return _ALLOWED.get()
