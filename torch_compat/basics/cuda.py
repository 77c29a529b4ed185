"""CUDA graphs below torch's Python surface."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def raw_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """The C++ replay of `graph`, bound: without the Python method that wraps it."""
    return super(torch.cuda.CUDAGraph, graph).replay


def nodes_captured() -> int:
    """Nodes of the graph that the current stream is capturing into; 0 for an invalid capture.

    The graph may be read while it is captured (driver API, cuStreamGetCaptureInfo). Asking now
    spares `keep_graph=True`, which keeps each graph beside its executable form.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status, capture = ctypes.c_int(), ctypes.c_uint64()
    graph, nodes = ctypes.c_void_p(), ctypes.c_size_t()
    out = (ctypes.byref(status), ctypes.byref(capture), ctypes.byref(graph), None, None)
    if (error := driver.cuStreamGetCaptureInfo_v2(stream, *out)) != 0:
        raise RuntimeError(f"cuStreamGetCaptureInfo returned CUDA driver error {error}")
    if not graph:
        return 0
    if (error := driver.cuGraphGetNodes(graph, None, ctypes.byref(nodes))) != 0:
        raise RuntimeError(f"cuGraphGetNodes returned CUDA driver error {error}")
    return nodes.value


def clear_cublas_workspaces() -> None:
    """Free the workspaces that torch keeps for cuBLAS, one per handle and stream of the process.

    The next matrix multiplication on a stream allocates one, in a capture in the graph's pool.
    """
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
