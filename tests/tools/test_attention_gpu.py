"""Attention on a GPU: the same numbers as on the CPU, and steps that can be captured."""

import pytest
import torch

from piecegraph import BatchDescriptor, ForwardContext, RuntimeMode, forward_context
from piecegraph.tools.engine import attention  # noqa: F401 - registers the op
from piecegraph.tools.engine.block_manager import BlockManager
from piecegraph.tools.engine.kv_cache import LayerCache
from piecegraph.tools.engine.metadata import MetadataBuffers
from piecegraph.tools.engine.scheduler import Request, Share, StepSchedule

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, BLOCK, NUM_BLOCKS = 8, 2, 32, 16, 80


def decodes(contexts, blocks):
    for i, context in enumerate(contexts):
        assert blocks.grow(i, context + 1)
    shares = [Share(Request(i, [0] * 200, 1), n, 1, True) for i, n in enumerate(contexts)]
    return StepSchedule(tuple(shares), ())


def chunks(shapes, blocks):
    for i, (start, query_len) in enumerate(shapes):
        assert blocks.grow(i, start + query_len)
    shares = [Share(Request(i, [0] * 200, 1), *shape, False) for i, shape in enumerate(shapes)]
    return StepSchedule(tuple(shares), ())


class Side:
    """One device's cache, buffers and inputs, the same on every device."""

    def __init__(self, device, rows, triton=False):
        self.buffers = MetadataBuffers(
            max_rows=rows, max_blocks=16, device=torch.device(device), triton=triton
        )
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, DIM, generator=generator).to(device)

        cache_shape = (NUM_BLOCKS, BLOCK, KV_HEADS)
        self.cache = LayerCache(draw(*cache_shape), draw(*cache_shape))
        self.query = draw(rows, HEADS)
        self.key, self.value = draw(rows, KV_HEADS), draw(rows, KV_HEADS)
        self.output = torch.full_like(self.query, torch.nan)

    def attend(self, metadata):
        with forward_context(ForwardContext({"here": self.cache}, metadata)):
            torch.ops.piecegraph_reference.paged_attention(
                self.query, self.key, self.value, self.output, "here"
            )
        return self.output


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("decode", [False, True])
def test_the_device_computes_what_the_cpu_does(decode, triton):
    outputs = []
    for device in ("cpu", "cuda"):
        blocks = BlockManager(NUM_BLOCKS, BLOCK)
        schedule = (
            decodes([40, 3, 100], blocks) if decode else chunks([(40, 1), (0, 5), (90, 2)], blocks)
        )
        side = Side(device, 8, triton and device == "cuda")
        metadata = side.buffers.fill(schedule, blocks, BatchDescriptor(8))
        outputs.append(side.attend(metadata).cpu())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
    assert (outputs[1][schedule.num_tokens :] == 0).all()


@pytest.mark.parametrize("triton", [False, True])
def test_a_captured_step_follows_the_buffers_contents(triton):
    """Plain code in decode steps, the kernel in every step."""
    side, expected = Side("cuda", 8, triton), Side("cuda", 8, triton)
    dummy = side.buffers.padding(BatchDescriptor(8, 8), RuntimeMode.FULL)
    side.attend(dummy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.attend(dummy)
    mixed = ([(40, 1), (0, 5), (90, 2)], [(3, 4)]) if triton else ()
    for shapes in ([40, 3, 100], [7], [120] * 8, *mixed):
        blocks = BlockManager(NUM_BLOCKS, BLOCK)
        schedule = (chunks if isinstance(shapes[0], tuple) else decodes)(shapes, blocks)
        side.buffers.fill(schedule, blocks, BatchDescriptor(8, 8))
        graph.replay()
        metadata = expected.buffers.fill(schedule, blocks, BatchDescriptor(8, 8))
        assert torch.equal(side.output, expected.attend(metadata))
