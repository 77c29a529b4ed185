"""Torch's public way to trace equal layers once does not do it for layers with names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytestmark = [
    pytest.mark.compile,
    pytest.mark.needs_torch("2.13", "no layer is copied"),
]

NUM_LAYERS = 12
traced = []


@torch.library.custom_op("public_regions::attention", mutates_args=())
def attention(x: Tensor, name: str) -> Tensor:
    return x.clone()


@attention.register_fake
def _(x: Tensor, name: str) -> Tensor:
    traced.append(name)
    return torch.empty_like(x)


class Layer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(8, 8), name

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.public_regions.attention(self.linear(x).relu(), self.name)


def num_traced(names):
    """How many layers torch traces until it fails or has traced all."""
    model = nn.Sequential(*map(Layer, names)).requires_grad_(False)
    traced.clear()
    torch._dynamo.reset()
    with torch.no_grad():
        try:
            torch.compile(model, backend="eager", fullgraph=True)(torch.randn(3, 8))
        except Exception as error:
            assert "reuse entries" in str(error)  # noqa: PT017
    return len(traced)


def test_layers_with_names_are_traced_each():
    assert num_traced(["layer"] * NUM_LAYERS) == 1, "regions of equal names are traced once"
    assert num_traced([f"layer.{number}" for number in range(NUM_LAYERS)]) > NUM_LAYERS // 2, (
        "torch.compiler.nested_compile_region traces layers with names once. Delete "
        "torch_compat/faster/equal_layers with its tests and its use in compile/speedups.py, and "
        "mark the layers there instead, if conditions are recorded for each layer"
    )
