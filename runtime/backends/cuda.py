"""The cuda backend: `torch.cuda.CUDAGraph`, captured raw on a stream of the pool's own.

`torch.cuda.graph` synchronizes the device and flushes allocators at each entry; here a session
does that once. Captures use the thread-local error mode, so that other threads may keep using
the device.

Nothing but captures uses a pool's stream. So no work of others gets into a graph, and the workspace
that cuBLAS keeps for the stream lies in the pool: no other graph depends on it, and those that
others depend on are never freed.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compile.plan.compiled_model import CompiledModel
from ...errors import BackendUnavailable
from ...torch_compat.basics.cuda import (
    capture_is_invalid,
    captured_nodes,
    current_stream_handle,
    end_allocation_to_pool,
    flush_host_cache,
    free_workspaces_of_captures,
    keep_forever,
    own_stream,
    upload,
)
from ...torch_compat.basics.tensors import unowned_alias
from .cuda_nodes import NodeLog
from .ownership import Ownership, TensorTracker
from .protocol import BoundGraph, Code, GraphPart, Memory, Replay

_ERROR_MODE = "thread_local"
_NOT_PERMITTED = 900  # cudaErrorStreamCaptureUnsupported
_BY_OTHERS = (
    "something else broke the capture: another thread must not synchronize the device or capture "
    "in torch's global mode meanwhile"
)


@dataclass(eq=False, slots=True)
class CudaPool:
    """Memory that captures share. `anchor` is an empty graph that is captured first and keeps the
    pool: without it the allocator fails when all graphs of a pool are gone while a tensor of
    theirs is still alive.
    """

    handle: Any  # an opaque pair of integers
    anchor: torch.cuda.CUDAGraph | None = None
    stream: torch.cuda.Stream | None = None
    """Captures run on it, and nothing else."""


class CudaGraph:
    """A captured graph. One without nodes only owns memory and is never replayed."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nodes: int, log: NodeLog | None) -> None:
        self.operations = nodes
        self._graph = graph
        self._log = log

    @property
    def parts(self) -> Sequence[GraphPart]:
        return self._log.parts(self._graph.pool()) if self._log is not None else ()

    @property
    def replay(self) -> Callable[[], None]:
        return self._graph.replay

    def release(self) -> None:
        self._graph.reset()


class CudaCapture:
    """A capture in progress on the pool's stream, which is current until it is closed."""

    def __init__(
        self, pool: CudaPool, device: int, ownership: Ownership, log: NodeLog | None
    ) -> None:
        self._pool = pool
        self._device = device
        self._tracker = TensorTracker("CUDA", ownership)
        self._log = log
        if log is not None:
            self._tracker.during = log.during
        self._graph = torch.cuda.CUDAGraph()
        self._on_stream = torch.cuda.stream(pool.stream)
        self._on_stream.__enter__()  # type: ignore[no-untyped-call]
        try:
            if pool.anchor is None:
                pool.anchor = _capture_nothing(pool.handle)
            self._graph.capture_begin(pool=pool.handle, capture_error_mode=_ERROR_MODE)
        except BaseException:
            self._recover()
            raise
        self._tracker.start()

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return self._tracker.opaque(fn, args)

    def end(self, run: bool = False) -> CudaGraph:
        self._tracker.stop()
        try:
            if capture_is_invalid():
                raise RuntimeError(_BY_OTHERS)
            nodes = captured_nodes()
            if self._log is not None:
                self._log.end()
        except BaseException:
            self._discard()
            raise
        try:
            self._graph.capture_end()
            if self._tracker.refused is not None:
                raise self._tracker.refused
            if nodes:  # one without nodes is never replayed
                upload(self._graph)
            elif self._tracker.computed:
                raise RuntimeError(
                    f"{self._tracker.computed} ran during the capture, and the graph has no node: "
                    "the work went to another device or stream"
                )
        except BaseException:
            self._recover()
            raise
        self._close()
        return CudaGraph(self._graph, nodes, self._log)

    def abort(self) -> None:
        self._tracker.stop()
        error = sys.exception()
        refused = getattr(error, "error_code", None) == _NOT_PERMITTED  # the call is in the error
        if error is not None and not refused and capture_is_invalid():
            error.add_note(_BY_OTHERS)
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
        finally:
            self._close()

    def _close(self) -> None:
        self._on_stream.__exit__(None, None, None)


class CudaBackend:
    """Graphs on one CUDA device: `device`, or the current one.

    Raises `BackendUnavailable` where there is none, on ROCm, and where torch has another allocator
    than its own caching one, to which pools belong.
    """

    name = "cuda"
    runs_python = False
    poison_result = None
    graph_class = torch.cuda.CUDAGraph

    def __init__(self, device: torch.device | None = None) -> None:
        if torch.version.hip is not None:
            reason = "torch is a ROCm build, on which this backend has never run"
            raise BackendUnavailable(name=self.name, reason=reason)
        if not torch.cuda.is_available():
            raise BackendUnavailable(name=self.name, reason="torch sees no CUDA device")
        if (allocator := torch.cuda.get_allocator_backend()) != "native":
            reason = f"torch allocates with {allocator} (PYTORCH_ALLOC_CONF), which has no pools"
            raise BackendUnavailable(name=self.name, reason=reason)
        if (setting := "PYTORCH_NO_CUDA_MEMORY_CACHING") in os.environ:
            reason = f"{setting} is set: torch allocates without its pools"
            raise BackendUnavailable(name=self.name, reason=reason)
        index = device.index if device is not None else None
        self._device = torch.cuda.current_device() if index is None else index
        self._idle_streams: defaultdict[int, list[torch.cuda.Stream]] = defaultdict(list)
        self.notes_nodes = False
        self._last: torch.cuda.Stream | None = None
        self._last_handle = 0
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
            torch.cuda.empty_cache()

    def release_pool(self, pool: CudaPool) -> None:
        self.synchronize()
        if pool.anchor is not None:
            pool.anchor.reset()
            pool.anchor = None
        if pool.stream is not None:
            free_workspaces_of_captures(pool.handle)
            self._idle_streams[pool.stream.priority].append(pool.stream)
            pool.stream = None
        self.trim()

    def link(self, code: Code, compiled: CompiledModel) -> Code:
        return code

    def install(self, graph: BoundGraph, compiled: CompiledModel) -> Replay:
        return graph.replay

    def recording(self, is_open: Callable[[], bool]) -> AbstractContextManager[None]:
        return nullcontext()

    def may_capture(self) -> bool:
        with torch.cuda.device(self._device):
            return not torch.cuda.is_current_stream_capturing()

    def begin(self, pool: CudaPool, ownership: Ownership) -> CudaCapture:
        current = torch.cuda.current_stream(self._device)
        if pool.stream is None or pool.stream.priority != current.priority:
            # graphs give the priority of their stream to their nodes: that of the engine's stream
            idle = self._idle_streams[current.priority]
            pool.stream = idle.pop() if idle else own_stream(self._device, current.priority)
        log = NodeLog() if self.notes_nodes else None
        return CudaCapture(pool, self._device, ownership, log)

    def order_steps(self) -> None:
        """Let the current stream wait for the last step if that ran on another stream.

        A step that the engine captures is ordered by the engine.
        """
        handle = current_stream_handle(self._device)
        if handle == self._last_handle and self._last is not None:
            return
        current = torch.cuda.current_stream(self._device)
        if not self.may_capture():
            return
        if self._last is not None:
            current.wait_stream(self._last)
        self._last, self._last_handle = current, handle

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

    def working_memory(self, run: Callable[[], None]) -> int:
        for _ in range(2):  # the first loads kernels and grows workspaces, which stay
            gc.collect()
            self.trim()
            before = self.memory().used
            run()
            self.synchronize()
        bytes_grown = self.memory().used - before
        self.trim()
        return bytes_grown

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def _capture_nothing(pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode=_ERROR_MODE)
    graph.capture_end()
    return graph
