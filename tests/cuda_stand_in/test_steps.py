"""A step hands its work to the device and does not wait for it."""

from __future__ import annotations

import pytest
import torch

import piecegraph as pg
from piecegraph.errors import InputMismatch
from piecegraph.tools.engine.block_manager import BlockManager
from piecegraph.tools.engine.metadata import MetadataBuffers
from piecegraph.tools.engine.scheduler import Request, Share, StepSchedule

from .control import StandIn
from .models import batch, eager, prepared

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def waits(stand_in: StandIn) -> int:
    return sum(map(stand_in.calls, WAITS))


def test_a_step_does_not_wait(stand_in):
    model = prepared("cuda:0", 64, graph_mode="PIECEWISE", capture_sizes=(8,), max_num_tokens=16)
    model.capture(lambda descriptor, mode: None)
    inputs = [torch.randn(num_tokens, 64, device="cuda:0") for num_tokens in (5, 16)]
    before, results = waits(stand_in), []
    for x in inputs:  # with a graph, and without
        results.append(model(x, batch=batch(len(x)), metadata=None).clone())
    assert waits(stand_in) == before
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, eager(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputMismatch, match="on cpu"):
        model(inputs[0].cpu().pin_memory(), batch=batch(5), metadata=None)
    model.close()


def test_random_numbers_follow_the_state_of_the_generator_at_the_launch():
    draws = []
    for seed in (0, 0, None):
        if seed is not None:
            torch.manual_seed(seed)
        draws.append(torch.empty(8, device="cuda").uniform_())
    one, same, other = draws
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("seed", range(3))
def test_metadata_is_uploaded_without_waiting(stand_in, seed):
    stand_in.seed(seed)
    blocks = BlockManager(16, 4)
    assert blocks.grow(0, 8)
    buffers = MetadataBuffers(max_rows=8, max_blocks=4, device=torch.device("cuda:0"))

    def fill(context: int) -> list[torch.Tensor]:
        share = Share(Request(0, [0] * 8, 1), context, 1, True)
        metadata = buffers.fill(StepSchedule((share,), ()), blocks, pg.BatchDescriptor(4))
        return [metadata.slot_mapping.clone(), metadata.seq_lens.clone()]

    before = waits(stand_in)
    first, second = fill(2), fill(5)  # the second writes the host's copy while the first is read
    assert waits(stand_in) == before
    slots = list(blocks.slots(0, 0, 8))
    for (slot_mapping, seq_lens), context in ((first, 2), (second, 5)):
        assert slot_mapping.cpu().tolist() == [slots[context], 0, 0, 0]
        assert seq_lens.cpu().tolist() == [context + 1, 0, 0, 0, 0]  # the last one owns padding
