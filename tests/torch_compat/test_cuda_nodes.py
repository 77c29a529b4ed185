"""Nodes of a CUDA graph, read from the driver while it is captured."""

import pytest
import torch

from piecegraph.torch_compat.basics.cuda import nodes_of_capture
from piecegraph.torch_compat.basics.cuda_nodes import KINDS, DriverNode, driver_node, nodes_before


@pytest.mark.gpu
def test_nodes_are_told_with_kernel_launch_addresses_and_what_they_wait_for():
    x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    host = torch.zeros(64, pin_memory=True)
    assert nodes_of_capture() == []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.add_(x)
        (first,) = nodes_of_capture()
        y.mul_(x)
        host.copy_(y, non_blocking=True)
        second, third = (n for n in sorted(nodes_of_capture(), key=depth) if n != first)
        nodes = [driver_node(each) for each in (first, second, third)]
        assert nodes_before(first) == []
        assert nodes_before(second) == [first]
    for node in nodes[:2]:
        assert isinstance(node, DriverNode)
        assert node.kind == KINDS[0] == "kernel"
        assert node.kernel
        assert len(node.launch["grid"]) == len(node.launch["block"]) == 3
        assert {x.data_ptr(), y.data_ptr()} <= {*node.pointers}
        assert node.unread == ""
    assert y.data_ptr() in nodes[2].pointers
    torch.cuda.synchronize()


def depth(node):
    return 1 + max(map(depth, nodes_before(node)), default=0)
