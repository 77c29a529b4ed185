"""LoRA for several adapters in one batch: a linear layer, and the op that adds up the adapters.

`piecegraph_reference::lora(x, down, up, rows, adapters)` finds each row's adapter through two index
tensors. `adapters` has one element for each active adapter, so its size, and with it the number of
kernels, is a host value: graphs are specialized by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .attention import LIBRARY

INPUTS = {"lora_rows": "int64[num_tokens]", "lora_adapters": "int64[num_loras]"}
"""Each row's place in `lora_adapters` (-1: the base model alone), and the active adapters."""

LoraIndex = tuple[torch.Tensor, torch.Tensor]

LIBRARY.define("lora(Tensor x, Tensor down, Tensor up, Tensor rows, Tensor adapters) -> Tensor")


def lora(
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    rows: torch.Tensor,
    adapters: torch.Tensor,
) -> torch.Tensor:
    """What the adapters add to each row of `x`: (T, in) to (T, out).

    `down` is (adapters, in, rank), `up` is (adapters, rank, out).
    """
    total = x.new_zeros(len(x), up.shape[2])
    for place in range(len(adapters)):
        adapter = adapters[place : place + 1]
        added = x @ down.index_select(0, adapter)[0] @ up.index_select(0, adapter)[0]
        total = torch.where((rows == place)[:, None], added, total)
    return total


def _fake(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, *index: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], up.shape[2])


LIBRARY.impl("lora", lora, "CPU")
LIBRARY.impl("lora", lora, "CUDA")
torch.library.register_fake("piecegraph_reference::lora", _fake, lib=LIBRARY)


class Linear(nn.Linear):
    """A linear layer without bias, whose weights are not drawn: the decoder draws them."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__(size, out, bias=False)

    def reset_parameters(self) -> None:
        """Drawing them twice takes a third of the time of building a decoder."""


class LoraLinear(Linear):
    """A linear layer to which each row adds the product of its adapter's two small matrices."""

    def __init__(self, size: int, out: int, *, adapters: int, rank: int = 4) -> None:
        super().__init__(size, out)
        self.down = nn.Parameter(torch.empty(adapters, size, rank))
        self.up = nn.Parameter(torch.empty(adapters, rank, out))

    def forward(self, x: torch.Tensor, index: LoraIndex | None = None) -> torch.Tensor:
        result = super().forward(x)
        if index is None:
            return result
        added: torch.Tensor = torch.ops.piecegraph_reference.lora(x, self.down, self.up, *index)
        return result + added
