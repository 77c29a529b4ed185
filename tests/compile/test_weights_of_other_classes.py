"""Weights that are no plain tensors: served, or refused by an error of the tree."""

import copy
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

from piecegraph import Batch, Config, prepare
from piecegraph.errors import PiecegraphError

pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture
def model():
    return Model().eval().requires_grad_(False)


def started(model, root):
    """Prepare and compare one step; returns whether it started from a bundle."""
    inputs = {"x": "float32[num_tokens,32]"}
    config = Config(max_num_tokens=16, inputs=inputs, cache_dir=root, graph_mode="NONE")
    prepared = prepare(model, config)
    x = torch.randn(7, 32)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(prepared(x, batch=Batch(7, 7)), expected, rtol=1e-3, atol=1e-3)
    return bool(prepared.compiled.from_bundle)


def test_packed_weights_of_dynamic_quantization_are_refused(model, tmp_path):
    packed = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(PiecegraphError):
        started(packed, tmp_path)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_plan_of_distributed_tensors_is_refused(model, mesh, tmp_path):
    parallel = dist.tensor.parallel
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh, plan)
    with pytest.raises(PiecegraphError):
        started(model, tmp_path)


def test_quantized_weights_of_torchao_are_in_bundles(model, tmp_path):
    torchao = pytest.importorskip(
        "torchao.quantization", reason="torchao is not installed: its int8 weights are not tried"
    )
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    other = copy.deepcopy(model)
    assert not started(model, tmp_path)
    assert started(other, tmp_path)


def test_linear_layers_of_bitsandbytes_are_served_or_refused(tmp_path):
    bitsandbytes = pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not installed: its layers are not tried"
    )
    model = Model().eval().requires_grad_(False)
    model.up = bitsandbytes.nn.Linear8bitLt(32, 64, has_fp16_weights=False)
    with suppress(PiecegraphError):
        started(model, tmp_path)
