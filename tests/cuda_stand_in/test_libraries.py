"""AOTInductor libraries and bundles of a device: compiled here, called in captures, loaded again.

Triton kernels are compiled to cubins by ptxas and launched without computing, so these tests look
at what is captured and loaded, and not at values.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import piecegraph as pg
from piecegraph.compile.backends import aoti

from .models import _OPS  # noqa: F401  the splitting op


class Layer(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.name = f"layer {index}"
        self.weight = torch.nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = torch.nn.functional.gelu(x @ self.weight)
        output = torch.empty_like(query)
        torch.ops.standin.attention(query, output, self.name)
        return torch.relu(output) + x


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(i) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def config(tmp_path: Path) -> pg.Config:
    return pg.Config(
        splitting_ops=("standin::attention",),
        inputs={"x": "float32[num_tokens, 8]"},
        max_num_tokens=64,
        max_num_reqs=8,
        capture_sizes=(4, 8),
        graph_mode="PIECEWISE",
        cache_dir=tmp_path / "cache",
    )


def captured(config: pg.Config) -> list[int]:
    layers = {f"layer {i}": None for i in range(3)}
    model = pg.prepare(Layers().to("cuda"), config, layers=layers)
    model.capture(lambda descriptor, mode: None)
    operations = [recording.operations for _, recording in model.recordings()]
    model.close()
    return operations


@pytest.mark.slow
def test_libraries_are_called_in_captures(config, monkeypatch):
    monkeypatch.setattr(aoti, "numeric_difference", lambda *_: None)  # kernels do not compute
    assert pg.compile_ahead(Layers().to("cuda"), config)
    assert captured(config) == [12, 12]


@pytest.mark.slow
def test_a_bundle_of_a_device_is_loaded_without_compiling(config, capfd):
    assert captured(config) == [12, 12]
    capfd.readouterr()
    forced = config.changed(bundle="force")
    assert captured(forced) == [12, 12]
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "cubin" not in said
