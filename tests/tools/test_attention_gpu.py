"""Attention on a GPU: the same numbers as on the CPU, and steps that can be captured."""

import pytest
import torch

from piecegraph import BatchDescriptor, RuntimeMode

from .attention_batches import Batch, attend, buffers_of

pytestmark = pytest.mark.gpu

FORM = {"heads": 8, "kv_heads": 2, "dim": 32, "block": 16}
DECODES, MIXED = [(40, 1), (3, 1), (100, 1)], [(40, 1), (0, 5), (90, 2)]


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("shapes", [DECODES, MIXED])
def test_the_device_computes_what_the_cpu_does(shapes, triton):
    form = {**FORM, "decode": shapes is DECODES}
    on_cpu, on_device = (Batch(shapes, device=device, **form) for device in ("cpu", "cuda"))
    output = on_device.run(3, triton=triton).cpu()
    torch.testing.assert_close(output, on_cpu.run(3), rtol=1e-4, atol=1e-4)
    assert (output[on_cpu.total :] == 0).all()


class Side:
    """Eight rows with buffers, a cache and inputs of their own, the same each time."""

    def __init__(self, triton):
        self.buffers = buffers_of(8, triton=triton, device="cuda")
        drawn = Batch([(0, 8)], device="cuda", **FORM)
        self.inputs, self.cache = drawn.inputs, drawn.cache
        self.output = torch.full_like(drawn.inputs[0], torch.nan)

    def attend(self, metadata):
        return attend(self.inputs, self.cache, metadata, self.output)


@pytest.mark.parametrize("triton", [False, True])
def test_a_captured_step_follows_the_buffers_contents(triton):
    """Plain code in decode steps, the kernel in every step."""
    side, expected = Side(triton), Side(triton)
    dummy = side.buffers.padding(BatchDescriptor(8, 8), RuntimeMode.FULL)
    side.attend(dummy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.attend(dummy)
    mixed = (MIXED, [(3, 4)]) if triton else ()
    for shapes in (DECODES, [(7, 1)], [(120, 1)] * 8, *mixed):
        batch = Batch(shapes, decode=shapes not in mixed, **FORM)
        side.buffers.fill(batch.schedule, batch.blocks, BatchDescriptor(8, 8))
        graph.replay()
        metadata = expected.buffers.fill(batch.schedule, batch.blocks, BatchDescriptor(8, 8))
        assert torch.equal(side.output, expected.attend(metadata))
