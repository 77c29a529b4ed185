"""Marks compiling and capturing that is expected, also after `seal()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ALLOWED: ContextVar[bool] = ContextVar("piecegraph_compilation_allowed", default=False)


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
