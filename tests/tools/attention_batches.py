"""Batches for the attention op: requests with random contexts in a random cache, and a step."""

from __future__ import annotations

import torch

from piecegraph import BatchDescriptor, ForwardContext, forward_context
from piecegraph.tools.engine import attention  # noqa: F401 - registers the op
from piecegraph.tools.engine.block_manager import BlockManager
from piecegraph.tools.engine.kv_cache import LayerCache
from piecegraph.tools.engine.metadata import MetadataBuffers
from piecegraph.tools.engine.scheduler import Request, Share, StepSchedule

NUM_BLOCKS = 160


def buffers_of(rows, *, triton=False, device="cpu"):
    device = torch.device(device)
    return MetadataBuffers(max_rows=rows, max_blocks=60, device=device, triton=triton)


def attend(inputs, cache, metadata, output=None):
    """The output of the op, which starts as NaN. `inputs` are query, key and value."""
    output = torch.full_like(inputs[0], torch.nan) if output is None else output
    with forward_context(ForwardContext({"here": cache}, metadata)):
        torch.ops.piecegraph_reference.paged_attention(*inputs, output, "here")
    return output


class Batch:
    """`shapes`: (context before the step, query length) of each request."""

    def __init__(
        self, shapes, *, decode=False, heads=4, kv_heads=2, dim=8, block=4, window=0,
        dtype=torch.float32, device="cpu",
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        self.blocks = BlockManager(NUM_BLOCKS, block)
        for i, (start, query_len) in enumerate(shapes):
            assert self.blocks.grow(i, start + query_len)
        shares = [Share(Request(i, [0] * 200, 1), *each, decode) for i, each in enumerate(shapes)]
        self.schedule = StepSchedule(tuple(shares), ())
        self.total = self.schedule.num_tokens

        def draw(*shape):
            return torch.randn(*shape, dim, generator=generator).to(device, dtype)

        self.cache = LayerCache(*(draw(NUM_BLOCKS, block, kv_heads) for _ in "kv"), window=window)
        fused = draw(self.total, heads + 2 * kv_heads)  # views: rows are not contiguous
        self.inputs = fused.split((heads, kv_heads, kv_heads), dim=1)

    def run(self, padding=0, *, garbage=torch.nan, buffers=None, triton=False, change=None):
        """The output; the cache is written. `change` is called with the metadata of the step."""
        rows = self.total + padding
        if buffers is None:
            buffers = buffers_of(rows, triton=triton, device=self.inputs[0].device)
        metadata = buffers.fill(self.schedule, self.blocks, BatchDescriptor(rows))
        if change is not None:
            change(metadata)
        padded = [
            torch.cat((real, real.new_full((padding, *real.shape[1:]), garbage)))
            for real in self.inputs
        ]
        return attend(padded, self.cache, metadata)
