"""CUDA graphs below torch's Python surface."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def own_stream(device: int, priority: int) -> torch.cuda.Stream:
    """A stream that nobody else can get: torch's come from a pool of 32 that the process shares.

    It is never destroyed: the allocator keeps the handle with the memory that was allocated on it,
    and waits for the stream before it unmaps a segment (`expandable_segments`).
    """
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        driver("cuStreamCreateWithPriority", ctypes.byref(handle), _NON_BLOCKING, priority)
    return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]


_NON_BLOCKING = 1

current_stream_handle: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: 0
)
"""The handle of a device's current stream, in a tenth of the time of `torch.cuda.current_stream`.
A build without CUDA has none."""


def driver_status(name: str, *arguments: Any) -> int:
    """What a function of the driver returns. Raises AttributeError where the driver has none."""
    return int(getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments))


def driver(name: str, *arguments: Any) -> None:
    """Call the driver. Raises RuntimeError, or OutOfMemoryError."""
    if (error := driver_status(name, *arguments)) != 0:
        kind = torch.OutOfMemoryError if error == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"{name} returned CUDA driver error {error}")


_OUT_OF_MEMORY = 2


def capture_is_invalid() -> bool:
    """Whether the current stream captures and the capture can only end with an error."""
    stream, status = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), ctypes.c_int()
    unasked = (None, None, None, None)
    ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2(stream, ctypes.byref(status), *unasked)
    return status.value == _INVALIDATED


_INVALIDATED = 2  # CU_STREAM_CAPTURE_STATUS_INVALIDATED


def captured_nodes() -> int:
    """Nodes of the graph that the current stream is capturing into; 0 for an invalid capture."""
    return len(nodes_of_capture())


def nodes_of_capture() -> list[int]:
    """The nodes of the graph that the current stream is capturing into, in no order; none of an
    invalid capture.

    The graph may be read while it is captured (driver API, cuStreamGetCaptureInfo). Asking now
    spares `keep_graph=True`, which keeps each graph beside its executable form.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status, capture, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    out = (ctypes.byref(status), ctypes.byref(capture), ctypes.byref(graph), None, None)
    driver("cuStreamGetCaptureInfo_v2", stream, *out)
    count = ctypes.c_size_t()
    if graph:
        driver("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_size_t * count.value)()
    if nodes:
        driver("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    return list(nodes)


def upload(graph: torch.cuda.CUDAGraph) -> None:
    """Send the executable form of a captured graph to the device, which its first launch would do:
    no step pays for it, and what it takes is read with the capture. Executes nothing.

    Raises OutOfMemoryError.
    """
    stream = torch.cuda.current_stream().cuda_stream
    handles = (ctypes.c_void_p(handle) for handle in (graph.raw_cuda_graph_exec(), stream))
    driver("cuGraphUpload", *handles)


def free_workspaces_of_captures(pool: Any) -> None:
    """Free the workspaces that cuBLAS allocated in `pool` on the streams of captures.

    From torch 2.12 on, `CUDAGraph.reset` has done it. Before, torch can only free those of all
    streams of the process. Graphs of others write to theirs: while another pool has memory, the
    workspace is left to the stream, whose next captures use it.
    """
    if torch.__version__ < "2.12":
        torch.cuda.empty_cache()
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        pools = {tuple(segment["segment_pool_id"]) for segment in segments}
        if pools <= {(0, 0), tuple(pool)}:
            torch._C._cuda_clearCublasWorkspaces()


def flush_host_cache() -> None:
    """Give cached pinned memory back."""
    torch._C._host_emptyCache()


def end_allocation_to_pool(device: int, pool: Any) -> None:
    """Stop sending allocations to `pool`. Raises RuntimeError where none are sent to it."""
    torch._C._cuda_endAllocateToPool(device, pool)


def keep_forever(graph: torch.cuda.CUDAGraph) -> None:
    """Never free `graph`: torch's allocators hold a pointer to it that cannot be removed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
