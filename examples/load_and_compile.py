"""Compile while the weights load: a model without weights is compiled in one thread, and its
weights are read in another. When they are there the start goes on as a warm one."""

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
    """Stands for files that take their time. Returns also when it was over."""
    weights = Model().state_dict()
    sleep(10.0)
    return weights, perf_counter()


with TemporaryDirectory() as cache:
    config = pg.Config(
        inputs={"x": f"float32[num_tokens, {WIDTH}]"}, max_num_tokens=16, cache_dir=cache
    )
    with torch.device("meta"):
        model = Model().eval()

    def load():
        """Called when the model is compiled."""
        weights, _ = reading.result()
        model.load_state_dict(weights, assign=True)

    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read_weights)
        served = pg.prepare(model, config, weights=load, device="cpu")
        ready = perf_counter()
    assert served.report()["cache"]["hit"]
    seconds = {each["name"]: each["seconds"] for each in served.report()["startup"]["phases"]}
    print(f"compiled in {seconds['compile']:.1f} s, waited {seconds['weights']:.1f} s for weights,")
    print(f"ready {ready - reading.result()[1]:.2f} s after the last of them, from the cache")
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(served(x, batch=pg.Batch(5, 1)), model(x))
    served.close()
