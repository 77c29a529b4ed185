"""`serve.py build DIR` compiles and stores the result in DIR; `serve.py serve DIR` loads from DIR.

Run `build` while the image is built, `serve` when the container starts. `serve` never compiles:
without a usable bundle it fails and names what differs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import piecegraph as pg


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # as if both had loaded the same weights
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def config(**settings: Any) -> pg.Config:
    """The same settings for building and for serving: they are part of the cache key."""
    return pg.Config(inputs={"x": "float32[num_tokens, 64]"}, max_num_tokens=128, **settings)


def build(directory: Path) -> None:
    # The private cache directory is readable by its owner only, a layer by every user.
    layer = {"at": directory.resolve().as_uri(), "write_back": True, "trust": "anybody"}
    model, settings = Model().eval(), config(cache={"layers": (layer,)})
    pg.prepare(model, settings)
    pg.compile_ahead(model, settings)  # libraries, which load in milliseconds


def serve(directory: Path) -> None:
    # No other user can write to the image's directory, so its content is trusted.
    layer = {"at": str(directory), "trust": "anybody"}
    prepared = pg.prepare(Model().eval(), config(cache={"layers": (layer,)}, bundle="force"))
    prepared.capture()
    prepared.seal()
    report = prepared.report()
    print("hit:", report["cache"]["hit"], "traces:", report["counters"]["dynamo_traces"])
    print("compiles:", report["counters"]["inductor_compiles"])
    print("prepare_seconds:", round(report["startup"]["prepare_seconds"], 3))
    print("Dynamo imported:", "torch._dynamo" in sys.modules)
    print(prepared(torch.ones(2, 64), batch=pg.Batch(2, 2)).shape)


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]))
    else:
        serve(Path(sys.argv[2]))
