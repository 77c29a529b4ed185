"""Memory of whole decoders, as torch's real caching allocator takes it: forecast, ledger, device.

Kernels are launched and do nothing, and the device's memory is reserved and never touched, so that
a model of 8 billion weights takes no memory of this machine.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import piecegraph as pg
from piecegraph.tools.engine.attention import SPLITTING_OP
from piecegraph.tools.engine.decoder_config import PRESETS, DecoderConfig
from piecegraph.tools.engine.kv_cache import LayerCache, allocate_layer_caches
from piecegraph.tools.engine.metadata import MetadataBuffers
from piecegraph.tools.engine.model import INPUTS, Decoder

from .control import StandIn
from .models import warm_up

MIB = 1 << 20
WORKSPACE = 32 << 20
"""What cuBLAS keeps for the engine's stream."""
SEGMENT = 20 * MIB
"""torch takes memory from the device in segments of this size or larger."""
RETURNED = WORKSPACE if torch.__version__ < "2.12" else 0
"""Before 2.12, freeing a pool frees the engine's workspace: it returns inside a larger segment, of
which as much is left."""
CUDA = torch.device("cuda")


@pytest.fixture
def large_device(stand_in: StandIn, without_values: None) -> Iterator[StandIn]:
    stand_in.limit_memory(80 << 30)
    stand_in.poison_up_to(0)
    gc.collect()
    torch.cuda.empty_cache()
    yield stand_in
    gc.collect()
    torch.cuda.empty_cache()


class Served:
    """A decoder on the device with its KV cache, prepared and not captured."""

    def __init__(self, config: DecoderConfig, max_num_tokens: int) -> None:
        with torch.device("meta"):
            model = Decoder(config, seed=0).to(torch.bfloat16)
        self.model = model.to_empty(device=CUDA)
        self.layers: dict[str, LayerCache] = allocate_layer_caches(
            model.layer_names,
            num_blocks=64,
            block_size=16,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
            device=CUDA,
        )
        self.buffers = MetadataBuffers(max_rows=max_num_tokens, max_blocks=16, device=CUDA)
        self.prepared = pg.prepare(
            self.model,
            pg.Config(
                splitting_ops=(SPLITTING_OP,),
                inputs=INPUTS,
                max_num_tokens=max_num_tokens,
                max_num_reqs=64,
                capture_sizes=[8, 16, 64, 256, 512, max_num_tokens // 2, max_num_tokens],
                compiler="eager",
                cache_dir=None,
                attention={"support": "UNIFORM_SINGLE_TOKEN_DECODE"},
            ),
            layers=self.layers,
        )
        self.prepared.parts.strategies.ledger.own(
            "KV cache", [part for each in self.layers.values() for part in (each.keys, each.values)]
        )


@pytest.mark.parametrize(
    ("config", "max_num_tokens"),
    [
        pytest.param(replace(PRESETS["small"], layers=4), 2048, id="small"),
        pytest.param(PRESETS["8b"], 4096, id="8b", marks=pytest.mark.slow),
    ],
)
def test_forecast_ledger_and_device_agree(large_device, config, max_num_tokens):
    served = Served(config, max_num_tokens)
    prepared, padding = served.prepared, served.buffers.padding
    warm_up()
    gc.collect()
    prepared.backend.trim()
    before = large_device.used()
    plan = prepared.parts.strategies.memory_plan(0.9, padding)
    assert large_device.used() - before <= max(SEGMENT, RETURNED)  # of probes
    prepared.capture(padding)
    used = large_device.used()
    ledger = {row["owner"]: row["bytes"] for row in prepared.report()["memory"]}
    pools = sum(num_bytes for owner, num_bytes in ledger.items() if owner.startswith("graph pool"))
    read = f"forecast {plan.graphs}, ledger {pools}, device {used - before} bytes"
    assert abs(plan.graphs - (used - before)) <= max(0.1 * pools, SEGMENT), read
    assert abs(pools - (used - before)) <= 2 * MIB + RETURNED, read
    free, total = torch.cuda.mem_get_info()
    assert total - free == used
    unowned = used - sum(ledger.values()) - WORKSPACE
    assert -WORKSPACE <= unowned <= max(0.1 * used, 2 * SEGMENT), f"{ledger}, {used}"
    print(f"{config.num_weights / 1e9:.1f} billion weights: {read}")
    prepared.close()
    gc.collect()
    assert large_device.used() <= before
