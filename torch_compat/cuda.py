"""CUDA graphs below torch's Python surface."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def raw_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """The C++ replay of `graph`, bound: without the Python method that wraps it."""
    return super(torch.cuda.CUDAGraph, graph).replay


def node_count(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a graph captured with `keep_graph=True`, asked of the driver torch has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    nodes = ctypes.c_size_t()
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    status = driver.cuGraphGetNodes(raw, None, ctypes.byref(nodes))
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes returned CUDA driver error {status}")
    return nodes.value


def flush_host_cache() -> None:
    """Give cached pinned memory back."""
    torch._C._host_emptyCache()


def end_allocation_to_pool(device: int, pool: Any) -> None:
    """Undo what an invalidated capture leaves behind: `capture_end` raises before it does this."""
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
