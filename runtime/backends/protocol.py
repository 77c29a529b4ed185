"""What a graph backend must do. Two ship, "replay" and "cuda"; others come by entry point.

A backend begins a capture into a memory pool and gets a graph out of it. Everything above these
protocols (segments, sessions, lifetimes, addresses) is the same for every accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from .ownership import Ownership


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use and bytes still free on the backend's device."""

    used: int
    free: int

    @property
    def measured_free(self) -> int | None:
        """None on a backend that has no limit."""
        return self.free if self.free < 1 << 60 else None


class Graph(Protocol):
    """What one capture recorded; it owns the pool memory that the capture allocated."""

    @property
    def operations(self) -> int:
        """Kernels, copies and fills recorded; a graph with none need not be replayed."""

    @property
    def replay(self) -> Callable[[], None]:
        """Run the recorded work on the recorded addresses."""

    def release(self) -> None:
        """Drop the graph and its memory; it cannot be replayed any more."""


class Capture(Protocol):
    """A capture that is open in the calling thread."""

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a compiled piece inside the capture, as one operation if need be."""

    def end(self) -> Graph:
        """Close the capture, also when it raises because no graph can be made of it."""

    def abort(self) -> None:
        """Drop the capture after an error; never raises for a capture that is already invalid."""


class GraphBackend(Protocol):
    """A way to capture and replay on one device."""

    name: str

    def new_pool(self) -> Any:
        """A handle of fresh memory that captures share."""

    def prepare(self) -> None:
        """Synchronise the device and flush its caches: once per capture session."""

    def capture_stream(self) -> AbstractContextManager[Any]:
        """The stream that captures run on, current inside the block."""

    def begin(self, pool: Any, ownership: Ownership) -> Capture:
        """Open a capture into `pool` on the capture stream.

        `ownership` is one recording's: the capture tells it what it makes and what it finds.
        """

    def settle(self, pool: Any) -> None:
        """Tensors held for the captures so far are dropped: later captures may use their memory."""

    def weak(self, tensor: Tensor) -> Tensor:
        """`tensor`, made by a graph, without keeping its block from later captures."""

    def address(self, tensor: Tensor) -> int:
        """Where the device finds the first element."""

    def memory(self) -> Memory:
        """Bytes used and free now."""

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
