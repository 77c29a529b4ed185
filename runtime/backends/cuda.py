"""The cuda backend: `torch.cuda.CUDAGraph`, captured raw on a side stream of the model's device.

`torch.cuda.graph` synchronizes the device and flushes allocators at each entry; here a session
does that once. Captures use the thread-local error mode, so that other threads may keep using
the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import BackendUnavailable
from ...torch_compat.basics.cuda import (
    captured_graph,
    clear_cublas_workspaces,
    end_allocation_to_pool,
    flush_host_cache,
    keep_forever,
    raw_replay,
)
from ...torch_compat.basics.tensors import unowned_alias
from .ownership import Ownership, TensorTracker
from .protocol import Memory

_ERROR_MODE = "thread_local"


@dataclass(eq=False, slots=True)
class CudaPool:
    """Memory that captures share. `anchor` is an empty graph that is captured first and keeps the
    pool: without it the allocator fails when all graphs of a pool are gone while a tensor of
    theirs is still alive.
    """

    handle: Any  # an opaque pair of integers
    anchor: torch.cuda.CUDAGraph | None = None


class CudaGraph:
    """A captured graph. One without nodes only owns memory and is never replayed."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nodes: int, topology: str) -> None:
        self.topology = topology
        self._graph = graph
        self._nodes = nodes

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

    def __init__(self, pool: CudaPool, device: int, ownership: Ownership) -> None:
        self._pool = pool
        self._device = device
        self._tracker = TensorTracker("CUDA", ownership)
        self._graph = torch.cuda.CUDAGraph()
        # a graph writes to the workspace of its capture, so that must be allocated in the pool
        clear_cublas_workspaces()
        try:
            self._graph.capture_begin(pool=pool.handle, capture_error_mode=_ERROR_MODE)
        except BaseException:
            self._recover()
            raise
        self._tracker.start()

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return self._tracker.opaque(fn, args)

    def end(self) -> CudaGraph:
        self._tracker.stop()
        try:
            nodes, topology = captured_graph()
        except BaseException:
            self._discard()
            raise
        try:
            self._graph.capture_end()
            if self._tracker.computed and not nodes:
                raise RuntimeError(
                    f"{self._tracker.computed} ran during the capture, and the graph has no node: "
                    "the work went to another device or stream"
                )
        except BaseException:
            self._recover()
            raise
        return CudaGraph(self._graph, nodes, topology)

    def abort(self) -> None:
        self._tracker.stop()
        self._discard()

    def _discard(self) -> None:
        """End the open capture."""
        with suppress(RuntimeError):  # the caller gets the error that broke the capture
            self._graph.capture_end()
        self._recover()

    def _recover(self) -> None:
        """Make the pool usable for later captures after one that failed.

        `capture_end` of an invalid capture raises. What it leaves behind depends on the version:
        up to torch 2.12 the allocators still send allocations to the pool, and the one of pinned
        memory has no way to stop; later versions stop both, but keep the pool's count.
        """
        with suppress(RuntimeError):
            end_allocation_to_pool(self._device, self._pool.handle)
        with suppress(RuntimeError):
            self._graph.reset()
        try:
            _capture_nothing(self._pool.handle).reset()
        except RuntimeError:  # still recording to it: this pool takes no capture any more
            keep_forever(self._graph)  # the allocators' filters refer to it
            self._pool.handle = torch.cuda.graph_pool_handle()
            self._pool.anchor = _capture_nothing(self._pool.handle)


class CudaBackend:
    """Graphs on one CUDA device: `device`, or the current one.

    Raises `BackendUnavailable` where there is none, and on ROCm.
    """

    name = "cuda"
    runs_python = False

    def __init__(self, device: torch.device | None = None) -> None:
        if torch.version.hip is not None:
            reason = "torch is a ROCm build, on which this backend has never run"
            raise BackendUnavailable(name=self.name, reason=reason)
        if not torch.cuda.is_available():
            raise BackendUnavailable(name=self.name, reason="torch sees no CUDA device")
        index = device.index if device is not None else None
        self._device = torch.cuda.current_device() if index is None else index
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # torch warns of each graph without nodes: two splitting ops in a row make one
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")

    def new_pool(self) -> CudaPool:
        return CudaPool(torch.cuda.graph_pool_handle())

    def prepare(self) -> None:
        self.synchronize()
        self.trim()
        flush_host_cache()

    def trim(self) -> None:
        with torch.cuda.device(self._device):
            clear_cublas_workspaces()
            torch.cuda.empty_cache()

    def release_pool(self, pool: CudaPool) -> None:
        self.synchronize()
        if pool.anchor is not None:
            pool.anchor.reset()
            pool.anchor = None
        self.trim()

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """The side stream. It waits for the current stream, which at the end waits for it."""
        with torch.cuda.device(self._device):
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
        return CudaCapture(pool, self._device, ownership)

    def release_held(self, pool: CudaPool) -> None:
        pass  # dropping the tensors is enough for the allocator

    def weak(self, tensor: Tensor) -> Tensor:
        return unowned_alias(tensor) if tensor.is_cuda else tensor

    address = staticmethod(Tensor.data_ptr)

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self._device)
        # not total - free: other processes may use the device
        used = torch.cuda.memory_reserved(self._device)
        return Memory(used, free, max(0, total - free - used))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def _capture_nothing(pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode=_ERROR_MODE)
    graph.capture_end()
    return graph
