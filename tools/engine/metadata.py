"""Attention metadata of a step, in buffers whose addresses never change.

A FULL graph holds the addresses of what it reads, so the buffers are allocated once and filled in
place, padded to the step's descriptor first: padding requests have length 0, padding tokens and
padding block-table entries point into the dump block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch

from ... import BatchDescriptor, Decision, RuntimeMode
from .block_manager import DUMP_BLOCK, BlockManager
from .kv_cache import LayerCache
from .scheduler import Schedule

DUMP_SLOT = 0
NOBODY = -1
"""Owner of the rows and blocks of padding."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What paged attention needs to know about one step; the tensors are views of the buffers.

    In a decode step every token, drafts included, is handled like a request of its own whose
    context ends with it: `block_table` (rows, max_blocks) and `seq_lens` (rows,) have one row per
    padded token, and only the tensors are read.
    Otherwise they have one row per request, and the host's lists, one entry per real request, say
    how the rows of the batch are divided. `slot_mapping` (tokens,) is where each token's key and
    value go. All tensors are int64.
    """

    decode: bool
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    def unpadded(self) -> AttentionMetadata:
        """The same step without its padding, for a model that runs on only the real rows."""
        tokens = sum(self.query_lens)
        rows = tokens if self.decode else len(self.query_lens)
        return replace(
            self,
            slot_mapping=self.slot_mapping[:tokens],
            block_table=self.block_table[:rows],
            seq_lens=self.seq_lens[:rows],
        )


@dataclass(frozen=True, slots=True)
class BucketMetadata:
    """One step in a bucket, int64, of shapes that depend only on the bucket's dimensions.

    For each row of the batch: its cache slot, request and position; for each block that attention
    reads: its place in the cache, request, and first position.
    """

    slot_mapping: torch.Tensor
    row_owner: torch.Tensor
    position: torch.Tensor
    blocks: torch.Tensor
    block_owner: torch.Tensor
    block_start: torch.Tensor

    def unpadded(self) -> BucketMetadata:
        """The step itself: its inputs are padded by the engine."""
        return self

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
    ) -> None:
        """Each row over the blocks of its request, up to its own position."""
        cache.keys.flatten(0, 1).index_copy_(0, self.slot_mapping, key)
        cache.values.flatten(0, 1).index_copy_(0, self.slot_mapping, value)
        block_size = cache.keys.shape[1]
        rows, heads, dim = query.shape
        group = heads // key.shape[1]
        keys, values = (paged[self.blocks].flatten(0, 1) for paged in (cache.keys, cache.values))
        places = torch.arange(block_size, device=query.device)
        positions = (self.block_start[:, None] + places).flatten()
        owners = self.block_owner.repeat_interleave(block_size, output_size=len(keys))
        seen = (self.row_owner[:, None] == owners) & (positions <= self.position[:, None])
        grouped = query.view(rows, -1, group, dim)
        scores = torch.einsum("rkgd,nkd->rkgn", grouped, keys) * dim**-0.5
        lowest = torch.finfo(torch.float32).min
        weights = scores.float().masked_fill(~seen[:, None, None], lowest).softmax(-1)
        weights = weights.masked_fill(~seen[:, None, None], 0).to(query.dtype)
        output.copy_(torch.einsum("rkgn,nkd->rkgd", weights, values).reshape(rows, heads, dim))


def recorded(metadata: Any, decision: Decision) -> Any:
    """What a step recorder keeps of a step's metadata: copies of its tensors, without padding."""
    real = metadata.unpadded()
    tensors = {
        field.name: value.clone()
        for field in fields(real)
        if isinstance(value := getattr(real, field.name), torch.Tensor)
    }
    return replace(real, **tensors)


class Buffers(Protocol):
    """The persistent buffers of an engine's metadata."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that graphs read, by name."""

    def fill(self, schedule: Schedule, blocks: BlockManager, descriptor: BatchDescriptor) -> Any:
        """A step's metadata, padded to `descriptor`."""

    def refill(self, recorded: Any, decision: Decision) -> Any:
        """The metadata of a step that `recorded` describes, for another decision."""

    def padding(self, descriptor: BatchDescriptor, mode: RuntimeMode) -> Any:
        """Metadata of a step without a request, for captures."""


class MetadataBuffers:
    """The persistent buffers and the two ways to fill them: from a schedule, or with padding.

    There are two sets of staging memory, in turn: the copies of a step in flight read theirs late.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, device: torch.device) -> None:
        shapes = (max_rows,), (max_rows, max_blocks), (max_rows,)
        self._staging = cycle([[np.zeros(s, dtype=np.int64) for s in shapes] for _ in range(2)])
        self.slot_mapping = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.block_table = torch.zeros((max_rows, max_blocks), dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        names = "slot_mapping", "block_table", "seq_lens"
        return {name: getattr(self, name) for name in names}

    def fill(
        self, schedule: Schedule, blocks: BlockManager, descriptor: BatchDescriptor
    ) -> AttentionMetadata:
        """Write a step's data, padded to `descriptor`, and return the views it runs with."""
        self._blank(descriptor.num_tokens)
        token = 0
        for row, share in enumerate(schedule.shares):
            table = blocks.table(share.request.id)
            slots = blocks.slots(share.request.id, share.start, share.context_len)
            stop = token + share.query_len
            self._host_slots[token:stop] = slots
            if schedule.is_decode:
                self._host_table[token:stop, : len(table)] = table
                self._host_lens[token:stop] = range(share.start + 1, share.context_len + 1)
            else:
                self._host_table[row, : len(table)] = table
                self._host_lens[row] = share.context_len
            token = stop
        return self._upload(
            descriptor.num_tokens,
            decode=schedule.is_decode,
            query_lens=tuple(share.query_len for share in schedule.shares),
            context_lens=tuple(share.context_len for share in schedule.shares),
        )

    def refill(self, recorded: AttentionMetadata, decision: Decision) -> AttentionMetadata:
        """Write what `recorded` kept of a step, padded for another decision."""
        descriptor = decision.descriptor
        self._blank(descriptor.num_tokens)
        pairs = (
            (self._host_slots, recorded.slot_mapping),
            (self._host_table, recorded.block_table),
            (self._host_lens, recorded.seq_lens),
        )
        for host, rows in pairs:
            part = host[tuple(map(slice, rows.shape))]
            part[:] = rows.numpy(force=True)
        return self._upload(
            descriptor.num_tokens,
            decode=recorded.decode,
            query_lens=recorded.query_lens,
            context_lens=recorded.context_lens,
        )

    def padding(self, descriptor: BatchDescriptor, mode: RuntimeMode) -> AttentionMetadata:
        """Metadata of a step without one real request, for the dummy runs of a capture.

        It selects the attention code that steps of this runtime mode use: only decode steps
        run as FULL graphs.
        """
        self._blank(descriptor.num_tokens)
        return self._upload(
            descriptor.num_tokens,
            decode=mode == RuntimeMode.FULL,
            query_lens=(),
            context_lens=(),
        )

    def _blank(self, rows: int) -> None:
        self._host_slots, self._host_table, self._host_lens = next(self._staging)
        self._host_slots[:rows] = DUMP_SLOT
        self._host_table[:rows] = DUMP_BLOCK
        self._host_lens[:rows] = 0

    def _upload(
        self,
        rows: int,
        *,
        decode: bool,
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
    ) -> AttentionMetadata:
        """Copy the first `rows` rows to the device. The host's copy can be reused on return."""
        pairs = (
            (self.slot_mapping, self._host_slots),
            (self.block_table, self._host_table),
            (self.seq_lens, self._host_lens),
        )
        slots, table, lens = (
            buffer[:rows].copy_(staged(torch.from_numpy(host[:rows]), buffer.device), True)
            for buffer, host in pairs
        )
        return AttentionMetadata(decode, slots, table, lens, query_lens, context_lens)


def staged(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host`, or for a GPU a pinned copy of it: a non-blocking copy to the device can read it after
    `host` was reused. torch keeps pinned memory until the device has read it."""
    return host.pin_memory() if device.type == "cuda" else host
