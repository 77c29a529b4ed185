"""A very small decoder: equal layers, split at a custom op that mixes rows."""

import torch
from torch import nn

LIBRARY = torch.library.Library("piecegraph_fleet", "DEF")
LIBRARY.define("mix(Tensor x, Tensor(a!) out, str layer) -> ()")


def _mix(x, out, layer):
    out.copy_(x.cumsum(0) / torch.arange(1, len(x) + 1, dtype=x.dtype)[:, None])


LIBRARY.impl("mix", _mix, "CompositeExplicitAutograd")
torch.library.register_fake("piecegraph_fleet::mix", lambda x, out, layer: None, lib=LIBRARY)


class Layer(nn.Module):
    def __init__(self, width, name):
        super().__init__()
        self.name = name
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x):
        y = self.inner(x)
        mixed = torch.empty_like(y)
        torch.ops.piecegraph_fleet.mix(y, mixed, self.name)
        return x + self.outer(torch.nn.functional.silu(mixed))


class Small(nn.Module):
    def __init__(self, layers, width=16):
        super().__init__()
        torch.manual_seed(layers)
        self.layers = nn.ModuleList(Layer(width, f"layers.{i}") for i in range(layers))
        self.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
