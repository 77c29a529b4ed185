"""Source texts of generated graphs are dropped by number."""

import linecache

import torch

from piecegraph.torch_compat.tracing.sources import drop_sources, next_source


def test_source_texts_of_a_graph_are_dropped():
    first = next_source()
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    torch.fx.GraphModule(torch.nn.Module(), graph)
    numbers = range(first, next_source())
    assert numbers
    names = [f"<eval_with_key>.{number}" for number in numbers]
    assert all("forward" in "".join(linecache.getlines(name)) for name in names)
    drop_sources(numbers)
    assert not any(linecache.getlines(name) for name in names)
