"""The cuda backend: `torch.cuda.CUDAGraph`, captured raw on a side stream.

`torch.cuda.graph` synchronizes the device and flushes allocators at each entry; here a session
does that once. Captures use the thread-local error mode, so that other threads may keep using the
device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import BackendUnavailable
from ...torch_compat.cuda import end_allocation_to_pool, flush_host_cache, node_count, raw_replay
from ...torch_compat.tensors import unowned_alias
from .ownership import Ownership, TensorTracker
from .protocol import Memory

_ERROR_MODE = "thread_local"


@dataclass(eq=False, slots=True)
class CudaPool:
    """A pool handle. `anchor` is an empty graph, captured first, that keeps the pool alive: without
    it the allocator fails if all graphs of a pool are freed before the last of their tensors."""

    handle: Any  # an opaque pair of integers
    anchor: torch.cuda.CUDAGraph | None = None


class CudaGraph:
    """A captured graph; one without nodes only owns memory and is never instantiated."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph
        self._nodes = node_count(graph)
        if self._nodes:
            graph.instantiate()

    @property
    def operations(self) -> int:
        return self._nodes

    @property
    def replay(self) -> Callable[[], None]:
        return raw_replay(self._graph)

    def release(self) -> None:
        self._graph.reset()


class CudaCapture:
    """A stream capture in progress on the current stream."""

    def __init__(self, pool: Any, device: int, ownership: Ownership) -> None:
        self._pool = pool
        self._device = device
        self._tracker = TensorTracker("CUDA", ownership)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._graph.capture_begin(pool=pool, capture_error_mode=_ERROR_MODE)
        self._tracker.start()

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return self._tracker.opaque(fn, args)

    def end(self) -> CudaGraph:
        self._tracker.stop()
        try:
            _end_quietly(self._graph)
        except BaseException:
            self._recover()
            raise
        return CudaGraph(self._graph)

    def abort(self) -> None:
        self._tracker.stop()
        try:
            _end_quietly(self._graph)
        except RuntimeError:  # the error that broke the capture is what the caller gets
            self._recover()
        self._graph.reset()

    def _recover(self) -> None:
        """After an invalid capture, stop the allocator from allocating to the pool."""
        try:
            end_allocation_to_pool(self._device, self._pool)
        except RuntimeError:  # it had stopped already
            return


class CudaBackend:
    """Graphs on the current CUDA device. Raises `BackendUnavailable` without one."""

    name = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise BackendUnavailable(name=self.name, reason="torch sees no CUDA device")
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def new_pool(self) -> CudaPool:
        return CudaPool(torch.cuda.graph_pool_handle())

    def prepare(self) -> None:
        self.synchronize()
        torch.cuda.empty_cache()
        flush_host_cache()

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """The side stream. It waits for the current stream, which at the end waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def begin(self, pool: CudaPool, ownership: Ownership) -> CudaCapture:
        if pool.anchor is None:
            pool.anchor = _capture_nothing(pool.handle)
        return CudaCapture(pool.handle, self._device, ownership)

    def release_held(self, pool: CudaPool) -> None:
        pass  # dropping the tensors is enough for the allocator

    def weak(self, tensor: Tensor) -> Tensor:
        return unowned_alias(tensor) if tensor.is_cuda else tensor

    address = staticmethod(Tensor.data_ptr)

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self._device)
        return Memory(total - free, free)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def _capture_nothing(pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin(pool=pool, capture_error_mode=_ERROR_MODE)
    _end_quietly(graph)
    return graph


def _end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture without torch's warning about an empty graph, which the user did not make."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()
