"""Values that are passed to operators: names and numbers among the arguments of nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecegraph.torch_compat.dynamo import import_dynamo

pytestmark = pytest.mark.compile


def test_names_within_arguments() -> None:
    import_dynamo()
    from piecegraph.torch_compat.passed_values import Name, Number, passed_within

    name, number = Name("layer.0"), Number(1)
    assert passed_within((1, [name, number], {"key": torch.float32})) == [name, number]
    assert not passed_within((1, ["layer.0"], {"key": torch.float32}))


def test_which_nodes_may_have_another_name_or_number() -> None:
    import_dynamo()
    from piecegraph.torch_compat.passed_values import Name, Number, may_differ

    def node(op: Any, *args: object) -> torch.fx.Node:
        return torch.fx.Graph().call_function(op, args)

    assert may_differ(node(torch.ops.aten.gelu, "x", Name("layer.0")))
    assert not may_differ(node(torch.ops.aten.add, "x", Number(1)))  # a copy would add another one
    assert not may_differ(node(torch.add, "x", Number(1)))
    assert not may_differ(node(torch.ops.aten.add, "x", 1))
