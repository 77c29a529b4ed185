"""One rank of a tensor-parallel model: `tensor_parallel.py FOLDER RANK SIZE`.

Rank 0 has the whole model too, and compares.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F

from piecegraph import Batch, Config, ReplayBackend, ReplayOptions, prepare
from tests.compile import ops as _registers  # noqa: F401


class Block(nn.Module):
    """Attention and an MLP whose heads and columns are split over ranks."""

    def __init__(self, rank, size):
        super().__init__()
        torch.manual_seed(0)
        whole = [torch.randn(shape) / 4 for shape in ((3, 8, 8), (8, 8), (16, 8), (8, 16))]
        part = slice(rank * 8 // size, (rank + 1) * 8 // size)
        wide = slice(rank * 16 // size, (rank + 1) * 16 // size)
        self.qkv = nn.Parameter(whole[0][:, part].flatten(0, 1), requires_grad=False)
        self.o = nn.Parameter(whole[1][:, part], requires_grad=False)
        self.up = nn.Parameter(whole[2][wide], requires_grad=False)
        self.down = nn.Parameter(whole[3][:, wide], requires_grad=False)
        self.size = size

    def reduced(self, x):
        return collectives.all_reduce(x, "sum", dist.group.WORLD) if self.size > 1 else x

    def forward(self, x):
        q, k, v = F.linear(x, self.qkv).chunk(3, -1)
        out = torch.empty_like(v)
        torch.ops.piecegraph_test.mix(q * k + v, out, "layers.0")
        x = x + self.reduced(F.linear(out, self.o))
        return x + self.reduced(F.linear(F.silu(F.linear(x, self.up)), self.down))


def main():
    folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), size, rank)
    config = Config(
        inputs={"x": "float32[num_tokens, 8]"},
        splitting_ops=("piecegraph_test::mix",),
        attention={"support": "ALWAYS"},
        max_num_tokens=16,
        max_num_reqs=16,
        capture_sizes=(4, 16),
        graph_mode="FULL_AND_PIECEWISE",
        compiler="eager",
        cache=False,
    )
    backend = ReplayBackend(ReplayOptions(poison_before_replay=True))
    prepared = prepare(Block(rank, size), config, backend=backend)
    prepared.capture()
    modes = set()
    for tokens in (1, 3, 4, 16):
        torch.manual_seed(tokens)
        x = torch.randn(tokens, 8)
        decode = tokens in (3, 4)
        batch = Batch(tokens, tokens, is_decode=True, query_len=1) if decode else Batch(tokens, 1)
        decision = prepared.dispatch(batch)
        modes.add(decision.mode.name)
        torch.testing.assert_close(prepared.run(decision, x), Block(0, 1)(x), rtol=1e-4, atol=1e-5)
    print(*sorted(modes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
