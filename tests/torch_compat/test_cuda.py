"""CUDA graphs below the Python surface."""

from __future__ import annotations

import pytest
import torch

from piecegraph.torch_compat import cuda


def test_names_for_a_device_exist_without_one() -> None:
    for name in ("_host_emptyCache", "_cuda_endAllocateToPool", "_cuda_clearCublasWorkspaces"):
        assert hasattr(torch._C, name) or not torch.cuda.is_available()
    for name in ("capture_begin", "capture_end", "instantiate", "raw_cuda_graph", "replay"):
        assert hasattr(torch.cuda.CUDAGraph, name)


@pytest.mark.gpu
def test_captured_nodes_are_counted_and_the_graph_replayed() -> None:
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        assert cuda.nodes_captured() == 1
    cuda.raw_replay(graph)()
    torch.cuda.synchronize()
    assert torch.equal(x, torch.ones_like(x))


@pytest.mark.gpu
def test_allocation_to_a_pool_that_gets_none_cannot_end() -> None:
    pool = torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError):
        cuda.end_allocation_to_pool(torch.cuda.current_device(), pool)


@pytest.mark.gpu
def test_caches_of_the_device_are_emptied() -> None:
    a = torch.ones(64, 64, device="cuda")
    (a @ a).sum().item()
    before = torch.cuda.memory_allocated()
    cuda.clear_cublas_workspaces()
    assert torch.cuda.memory_allocated() <= before
    cuda.flush_host_cache()


@pytest.mark.gpu
def test_graph_that_is_kept_forever_has_one_more_reference() -> None:
    import sys

    graph = torch.cuda.CUDAGraph()
    before = sys.getrefcount(graph)
    cuda.keep_forever(graph)
    assert sys.getrefcount(graph) == before + 1
