"""Names of layers among the arguments of nodes."""

from types import SimpleNamespace

import pytest
import torch

from piecegraph.torch_compat.tracing.dynamo import import_dynamo

pytestmark = pytest.mark.compile


def test_names_in_the_arguments_of_a_node():
    import_dynamo()
    from piecegraph.torch_compat.faster.equal_layers.names import Name, names_in

    name, graph = Name("layer.0"), torch.fx.Graph()
    node = graph.call_function(torch.add, (1, [name]), {"key": torch.float32})
    assert names_in(node) == [name]
    plain = graph.call_function(torch.add, (1, ["layer.0"]))
    assert not names_in(plain)


def test_nodes_are_left_with_plain_names():
    import_dynamo()
    from piecegraph.torch_compat.faster.equal_layers.names import Name, plain_names

    graph = torch.fx.Graph()
    node = graph.call_function(torch.add, ("x", [Name("layer.0"), 1]), {"key": Name("layer.1")})
    plain_names(graph)
    assert (node.args, node.kwargs) == (("x", ["layer.0", 1]), {"key": "layer.1"})
    (_, (name, _)), other = node.args, node.kwargs["key"]
    assert [type(name), type(other)] == [str, str]


def test_a_label_is_told_by_its_source():
    import_dynamo()
    from torch._dynamo.source import LocalSource, SyntheticLocalSource

    from piecegraph.torch_compat.faster.equal_layers.names import is_label, text

    label, argument = SyntheticLocalSource("tmp_0"), LocalSource("x")
    nodes = [torch.fx.Graph().placeholder(name) for name in ("label", "argument", "size")]
    for node, source in zip(nodes, (label, argument), strict=False):
        node.meta["grapharg"] = SimpleNamespace(source=source)
    assert [is_label(node) for node in nodes] == [True, False, False]
    assert text(argument) == "L['x']"
