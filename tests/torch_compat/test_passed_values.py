"""Values that are passed to operators: names and numbers among the arguments of nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piecegraph.torch_compat.tracing.dynamo import import_dynamo

pytestmark = pytest.mark.compile


def test_names_within_arguments() -> None:
    import_dynamo()
    from piecegraph.torch_compat.faster.equal_layers.passed_values import (
        Name,
        Number,
        passed_within,
    )

    name, number = Name("layer.0"), Number(1)
    assert passed_within((1, [name, number], {"key": torch.float32})) == [name, number]
    assert not passed_within((1, ["layer.0"], {"key": torch.float32}))


def test_which_nodes_may_have_another_name_or_number() -> None:
    import_dynamo()
    from piecegraph.torch_compat.faster.equal_layers.passed_values import Name, Number, may_differ

    def node(op: Any, *args: object) -> torch.fx.Node:
        return torch.fx.Graph().call_function(op, args)

    assert may_differ(node(torch.ops.aten.gelu, "x", Name("layer.0")))
    assert not may_differ(node(torch.ops.aten.add, "x", Number(1)))  # a copy would add another one
    assert not may_differ(node(torch.add, "x", Number(1)))
    assert not may_differ(node(torch.ops.aten.add, "x", 1))


def test_nodes_are_left_with_plain_names_and_numbers() -> None:
    import_dynamo()
    from piecegraph.torch_compat.faster.equal_layers.passed_values import (
        Name,
        Number,
        without_names,
    )

    graph = torch.fx.Graph()
    node = graph.call_function(torch.add, ("x", [Name("layer.0"), Number(1)]), {"key": Number(2)})
    without_names(graph)
    assert (node.args, node.kwargs) == (("x", ["layer.0", 1]), {"key": 2})
    ((_, (name, number)), other) = node.args, node.kwargs["key"]
    assert [type(each) for each in (name, number, other)] == [str, int, int]


def test_a_node_that_stands_for_a_made_object_is_told_by_its_source() -> None:
    import_dynamo()
    from torch._dynamo.source import LocalSource, SyntheticLocalSource

    from piecegraph.torch_compat.faster.equal_layers.passed_values import is_made, text

    made, given = SyntheticLocalSource("tmp_0"), LocalSource("x")
    nodes = [torch.fx.Graph().placeholder(name) for name in ("made", "given", "of_a_size")]
    for node, source in zip(nodes, (made, given), strict=False):
        node.meta["grapharg"] = SimpleNamespace(source=source)
    assert [is_made(node) for node in nodes] == [True, False, False]
    assert text(given) == "L['x']"
