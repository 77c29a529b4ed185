"""Context managers as nodes of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecegraph.torch_compat import dynamo


@pytest.mark.parametrize(
    ("make", "gradients"),
    [
        (torch.inference_mode, True),
        (torch.enable_grad, True),
        (lambda: torch.autocast("cpu", torch.bfloat16), False),
    ],
)
def test_contexts_in_a_graph_are_recognized(make: Any, gradients: bool) -> None:
    class Inside(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with make():
                return x @ x

    with dynamo.dynamo_tracing("backed"):
        captured = dynamo.capture_full_graph(Inside(), (torch.zeros(2, 2),), {})
    assert captured is not None
    targets = [node.target for node in captured.graph.graph.nodes if node.op == "call_function"]
    assert any(map(dynamo.is_gradient_switch, targets)) is gradients
    assert (dynamo.enter_autocast in targets) is not gradients
    assert (dynamo.exit_autocast in targets) is not gradients
