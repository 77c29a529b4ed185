"""A graph backend whose graphs do nothing when they are replayed.

With it a step consists of the library's own work and of calls that cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch


class IdleGraph:
    """A capture, which runs what it captures, and its graph, which runs nothing."""

    operations = 1

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return fn(*args)

    def end(self) -> IdleGraph:
        return self

    def abort(self) -> None:
        pass

    def replay(self) -> None:
        pass

    def release(self) -> None:
        pass


class IdleBackend:
    name = "idle"
    runs_python = False

    def new_pool(self) -> Any:
        return None

    def prepare(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def release_pool(self, pool: Any) -> None:
        pass

    def capture_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin(self, pool: Any, ownership: Any) -> IdleGraph:
        return IdleGraph()

    def release_held(self, pool: Any) -> None:
        pass

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    address = staticmethod(torch.Tensor.data_ptr)

    def memory(self) -> Any:
        return SimpleNamespace(used=0, free=0)

    def synchronize(self) -> None:
        pass
