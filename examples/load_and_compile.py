"""Compile while the weights load: a model without weights is compiled in one thread, and its
weights are read in another. When they are there the start is a warm one."""

from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

import torch
from torch import nn

import piecegraph as pg

LAYERS, WIDTH = 4, 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(self.norm(x)))
        return x


def read_weights():
    """Stands for files that take their time."""
    weights = Model().state_dict()
    sleep(2.0)
    return weights


with TemporaryDirectory() as cache:
    config = pg.Config(
        inputs={"x": f"float32[num_tokens, {WIDTH}]"}, max_num_tokens=16, cache_dir=cache
    )
    with torch.device("meta"):
        model = Model().eval()
    with ThreadPoolExecutor(1) as reader:
        weights = reader.submit(read_weights)
        assert pg.compile_ahead(model, config, device="cpu")
        model.load_state_dict(weights.result(), assign=True)

    began = perf_counter()
    served = pg.prepare(model, config)
    print(f"ready {perf_counter() - began:.2f} s after the weights,", end=" ")
    print("from the cache" if served.report()["cache"]["hit"] else "compiled again")
    assert served.report()["cache"]["hit"]
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(served(x, batch=pg.Batch(5, 1)), model(x))
    served.close()
