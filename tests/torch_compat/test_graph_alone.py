"""A graph without what Dynamo makes for its callers."""

from __future__ import annotations

import pytest
import torch

from piecegraph.torch_compat.faster.graph_alone import graph_alone
from piecegraph.torch_compat.tracing import dynamo

from .test_dynamo import Scaled, captured


def test_a_graph_has_code_when_it_is_called() -> None:
    model, x = Scaled(), torch.ones(5, 2)
    with graph_alone():
        trace = captured(model, x)
    graph, passed = trace.graph, []

    def called(*inputs: torch.Tensor) -> tuple[torch.Tensor]:
        passed.extend(inputs)
        return (x,)

    assert trace.call(called)(x)["y"] is x
    assert not passed
    with pytest.raises(RuntimeError, match="not been generated"):
        _ = graph.code
    sources = map(dynamo.input_source, graph.graph.find_nodes(op="placeholder"))
    values = [eval(source, {"L": {"self": model, "x": x}}) for source in sources]
    for _ in range(2):
        assert torch.equal(graph(*values)[0], torch.full((5, 2), 6.0))
    assert "def forward" in graph.code
