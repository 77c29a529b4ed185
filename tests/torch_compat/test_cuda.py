"""CUDA graphs below the Python surface."""

import ctypes
import sys
from contextlib import suppress

import pytest
import torch

from piecegraph.torch_compat.basics import cuda


def test_names_for_a_device_exist_without_one():
    names = ("_host_emptyCache", "_cuda_endAllocateToPool", "_cuda_clearCublasWorkspaces")
    for name in names:
        assert hasattr(torch._C, name) or not torch.cuda.is_available()
    for name in ("capture_begin", "capture_end", "replay"):
        assert hasattr(torch.cuda.CUDAGraph, name)


def test_object_that_is_kept_forever_gains_a_reference():
    graph = object()
    before = sys.getrefcount(graph)
    cuda.keep_forever(graph)
    assert sys.getrefcount(graph) == before + 1


@pytest.mark.gpu
def test_captured_nodes_are_counted_and_replayed():
    x = torch.zeros(4, device="cuda")
    assert cuda.captured_nodes() == len(cuda.nodes_of_capture()) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert cuda.captured_nodes() == 0
        x.add_(1)
        assert cuda.captured_nodes() == 1
    cuda.upload(graph)
    torch.cuda.synchronize()
    assert torch.equal(x, torch.zeros_like(x))  # nothing is executed
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, torch.ones_like(x))
    cuda.flush_host_cache()
    cuda.free_workspaces_of_captures(graph.pool())


@pytest.mark.gpu
def test_status_of_the_driver_is_given_and_what_it_has_not_is_an_error():
    assert cuda.driver_status("cuInit", 0) == 0
    with pytest.raises(AttributeError, match="cuNothing"):
        cuda.driver_status("cuNothing")
    with pytest.raises(RuntimeError, match="cuPointerGetAttribute returned CUDA driver error 1"):
        cuda.driver("cuPointerGetAttribute", (ctypes.c_int * 1)(), 2, ctypes.c_uint64(64))


@pytest.mark.gpu
def test_a_stream_of_our_own_is_in_no_pool():
    device = torch.cuda.current_device()
    lowest, highest = (torch.cuda.Stream(priority=each).priority for each in (0, -1))
    streams = [cuda.own_stream(device, priority) for priority in (lowest, highest)]
    handles = {torch.cuda.Stream().cuda_stream for _ in range(40)}
    assert not handles & {stream.cuda_stream for stream in streams}
    assert [stream.priority for stream in streams] == [lowest, highest]
    with torch.cuda.stream(streams[0]):
        assert cuda.current_stream_handle(device) == streams[0].cuda_stream


@pytest.mark.gpu
def test_allocations_stop_going_to_the_pool_of_an_invalid_capture():
    pool = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        assert not cuda.capture_is_invalid()
        with pytest.raises(RuntimeError):
            torch.zeros(1, device="cuda").item()
        assert cuda.capture_is_invalid()
        with pytest.raises(RuntimeError):
            graph.capture_end()
    with suppress(RuntimeError):  # from torch 2.13 on `capture_end` has done it
        cuda.end_allocation_to_pool(torch.cuda.current_device(), pool)
    cuda.keep_forever(graph)
    assert torch.ones(2, device="cuda").sum().item() == 2
