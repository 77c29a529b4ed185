"""CUDA graphs below the Python surface."""

from __future__ import annotations

import pytest
import torch

from piecegraph.torch_compat import cuda


def test_names_for_a_device_exist_without_one() -> None:
    for name in ("_host_emptyCache", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        assert hasattr(torch._C, name) or not torch.cuda.is_available()
    for name in ("capture_begin", "capture_end", "instantiate", "raw_cuda_graph", "replay"):
        assert hasattr(torch.cuda.CUDAGraph, name)


@pytest.mark.gpu
def test_captured_graph_is_counted_and_replayed() -> None:
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x.add_(1)
    assert cuda.node_count(graph) == 1
    graph.instantiate()
    cuda.raw_replay(graph)()
    torch.cuda.synchronize()
    assert torch.equal(x, torch.ones_like(x))
    cuda.flush_host_cache()


@pytest.mark.gpu
def test_pool_of_an_invalidated_capture_is_released() -> None:
    pool = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        with pytest.raises(RuntimeError):
            torch.zeros(1, device="cuda").item()
        with pytest.raises(RuntimeError):
            graph.capture_end()
    cuda.end_allocation_to_pool(torch.cuda.current_device(), pool)
    assert torch.ones(2, device="cuda").sum().item() == 2
