"""How many nodes a FULL graph has beside one of `torch.compile`, for capability 9.0, as lines of
tables.md: `python tests/cuda_stand_in/run.py -m tests.cuda_stand_in.node_table FORM`.

No kernel computes here. So nothing is proved by running it, such as Inductor's guard that there is
more than one token: what is compared is what memory held before.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import piecegraph as pg
from piecegraph.torch_compat.basics.cuda import captured_nodes
from tests.ops import define

from .control import StandIn
from .models import _OPS

LAYERS, HIDDEN, HEADS = 3, 256, 4
SCHEMA = "empty_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) output, str name) -> ()"
define(_OPS, SCHEMA, lambda *_: None)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * self.weight


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.float().chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)


class Llama(nn.Module):
    """A layer: norms before attention and SwiGLU, each added to the residual stream."""

    norm: Any = RMSNorm
    bias = False

    def __init__(self, index: int) -> None:
        super().__init__()
        self.name = f"layer {index}"
        self.first, self.second = self.norm(), self.norm()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, self.bias)
        self.out = nn.Linear(HIDDEN, HIDDEN, self.bias)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, self.bias)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, self.bias)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (part.view(len(x), HEADS, -1) for part in self.qkv(x).chunk(3, -1))
        query, key = turned(query, cos, sin), turned(key, cos, sin)
        output = torch.empty_like(query)
        torch.ops.standin.empty_attention(query, key, value, output, self.name)
        return self.out(output.view(len(x), HIDDEN))

    def feed(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.first(x), cos, sin)
        return x + self.feed(self.second(x))


class Biased(Llama):
    """LayerNorm, and linear layers with biases."""

    norm = staticmethod(lambda: nn.LayerNorm(HIDDEN))
    bias = True


class Parallel(Llama):
    """Attention and MLP of the same input."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.first(x)
        return x + self.attend(normed, cos, sin) + self.feed(normed)


class NormAfter(Llama):
    """Norms of what is added to the residual stream."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.first(self.attend(x, cos, sin))
        return x + self.second(self.feed(x))


FORMS = {"Llama": Llama, "biases": Biased, "parallel": Parallel, "norms after": NormAfter}


class Model(nn.Module):
    def __init__(self, form: type[Llama]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, HIDDEN)
        self.layers = nn.ModuleList(form(index) for index in range(LAYERS))
        self.norm = RMSNorm()
        self.frequencies = nn.Buffer(torch.ones(HIDDEN // HEADS // 2))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        angles = positions.float()[:, None, None] * self.frequencies.float()
        x, cos, sin = self.embedding(ids), angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


def of_pieces(model: Model) -> tuple[int, int]:
    """Nodes of the FULL graph, and copies among them."""
    inputs = dict.fromkeys(("ids", "positions"), "int64[num_tokens]")
    with tempfile.TemporaryDirectory() as cache:
        config = pg.Config(
            splitting_ops=("standin::empty_attention",), inputs=inputs,
            max_num_tokens=64, max_num_reqs=8, capture_sizes=(8,), graph_mode="FULL",
            attention={"support": "ALWAYS"}, cache_dir=cache, tracing={"min_num_tokens": 2},
        )  # fmt: skip
        layers = {layer.name: None for layer in model.layers}
        prepared = pg.prepare(model, config, layers=layers)
        prepared.capture(lambda descriptor, mode: None)
        prepared.release()  # the first capture compares what its dummy runs write
        before = StandIn().calls("cudaMemcpyAsync")
        prepared.capture(lambda descriptor, mode: None)
        copies = StandIn().calls("cudaMemcpyAsync") - before
        ((_, recording),) = prepared.recordings()
        nodes = recording.operations
        prepared.close()
    return nodes, copies


@torch.no_grad()
def of_torch_compile(model: Model) -> int:
    ids = torch.zeros(8, dtype=torch.int64, device="cuda")
    compiled = torch.compile(model, dynamic=True)
    compiled(ids, ids)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        compiled(ids, ids)
        return captured_nodes()


if __name__ == "__main__":
    model = Model(FORMS[sys.argv[1]]).to("cuda", torch.bfloat16)
    row = torch.__version__.partition("+")[0], sys.argv[1], of_torch_compile(model)
    print("|", *(f"{cell} |" for cell in (*row, *of_pieces(model))))
