"""A small model with a splitting op, on a device."""

from __future__ import annotations

from typing import Any

import torch

import piecegraph as pg
from tests.ops import define

HIDDEN = 512
_OPS = torch.library.Library("standin", "DEF")


def _attention(query: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    output.copy_(query * 2.0)


define(_OPS, "attention(Tensor query, Tensor(a!) output, str layer_name) -> ()", _attention)


class Model(torch.nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Linear(hidden, 4 * hidden)
        self.after = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = torch.nn.functional.gelu(self.before(x))
        output = torch.empty_like(query)
        torch.ops.standin.attention(query, output, "layer 0")
        return self.after(torch.relu(output) + 1.0)


def prepared(
    device: str = "cuda",
    hidden: int = HIDDEN,
    model: torch.nn.Module | None = None,
    given: dict[str, Any] | None = None,
    **settings: Any,
) -> pg.PreparedModel:
    """`model`, or `Model` of that width, with the arguments of `prepare` that are `given`."""
    config = pg.Config(
        splitting_ops=("standin::attention",),
        inputs={"x": f"float32[num_tokens, {hidden}]"},
        max_num_tokens=4096,
        max_num_reqs=8,
        compiler="eager",
        cache_dir=None,
        attention={"support": "ALWAYS"},
    )
    model = (model or Model(hidden)).to(device)
    given = {"layers": {"layer 0": None}} | (given or {})
    return pg.prepare(model, config.changed(**settings), **given)


def eager(x: torch.Tensor) -> torch.Tensor:
    """What the model gives without the library."""
    return Model(x.shape[-1]).to(x.device)(x).detach()


def batch(num_tokens: int) -> pg.Batch:
    return pg.Batch(
        num_tokens=num_tokens, num_reqs=1, is_decode=num_tokens == 1, query_len=num_tokens
    )


def warm_up() -> None:
    """Multiply on the current stream, as an engine has: cuBLAS allocates its workspace for it.

    Before torch 2.12 the release of a pool can free it, and the next multiplication brings it back.
    """
    x = torch.ones(8, 8, device="cuda")
    torch.addmm(x, x, x)
    torch.addmm(x[0], x, x)
    torch.cuda.synchronize()
