"""What no graph can hold is refused on each backend by the same error, op and line."""

import pytest
import torch
from torch import nn

from piecegraph import ReplayBackend, prepare
from piecegraph.errors import AllCapturesFailed

from ..conftest import small_config

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draws(x, generator):
    return x + torch.rand(x.shape, generator=generator, device=x.device)


def branches(x, generator):
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def drops(x, generator):
    return nn.functional.dropout(x, 0.5)


class Model(nn.Module):
    def __init__(self, scene, device):
        super().__init__()
        self.scene = scene
        self.generator = torch.Generator(device).manual_seed(3)

    def forward(self, x):
        return self.scene(x, self.generator)


SCENES = [
    (draws, {"compile": False}, "GeneratorInCapture: aten.rand.generator"),
    (branches, {"compile": False}, "HostReadInCapture: cond reads a tensor's value on the host"),
    (branches, {"compiler": "eager"}, "HostReadInCapture: cond reads a tensor's value on the host"),
    (drops, {"compile": False}, ""),
    (drops, {"compiler": "eager"}, ""),
]


@pytest.mark.compile
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("scene", "settings", "refused"), SCENES)
def test_backends_refuse_the_same(scene, settings, refused, device):
    config = small_config(4, capture_sizes=(4,), **settings)
    backend = ReplayBackend() if device == "cpu" else None
    prepared = prepare(Model(scene, device).to(device), config, backend=backend)
    try:
        prepared.capture()
        said = ""
    except AllCapturesFailed as error:
        said = str(error)
        line = f"test_refused_alike.py:{scene.__code__.co_firstlineno + 1}"
        assert line in said
    assert refused in said
    assert "0x" not in said
    assert bool(said) == bool(refused)
    prepared.close()
