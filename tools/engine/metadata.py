"""Attention metadata of a step, in buffers whose addresses never change.

A FULL graph holds the addresses of what it reads, so the buffers are allocated once and filled in
place, padded to the step's descriptor first: padding requests have length 0, padding tokens have no
slot or one of the dump block, which padding block-table entries point to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from ... import BatchDescriptor, Decision, RuntimeMode
from .block_manager import DUMP_BLOCK, BlockManager
from .kv_cache import LayerCache
from .scheduler import StepSchedule

DUMP_SLOT = 0
NO_SLOT = -1
"""Where the Triton kernel writes no row; an index of plain code must be a slot."""
NOBODY = -1
"""Owner of the rows and blocks of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """What paged attention needs to know about one step; the tensors are views of the buffers.

    `slot_mapping` (tokens,) is where each token's key and value go. `block_table` (requests,
    max_blocks) and `seq_lens` (requests,) have one row per request, `query_start_loc` (requests +
    1,) its first row in the batch. The tokens of padding belong to a request of length 0 after the
    real ones. All tensors are int64.

    Code for prompts reads the host's lists instead, one entry per real request. `triton`: the
    kernel computes the step, otherwise plain code, chosen by `decode`.
    """

    decode: bool
    triton: bool = False
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.slot_mapping, self.block_table, self.seq_lens, self.query_start_loc

    def unpadded(self) -> AttentionMetadata:
        """The same step without its padding, for a model that runs on only the real rows and with
        plain code."""
        tokens, requests = sum(self.query_lens), len(self.query_lens)
        return replace(
            self,
            triton=False,
            slot_mapping=self.slot_mapping[:tokens],
            block_table=self.block_table[:requests],
            seq_lens=self.seq_lens[:requests],
            query_start_loc=self.query_start_loc[: requests + 1],
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

    def fill(
        self, schedule: StepSchedule, blocks: BlockManager, descriptor: BatchDescriptor
    ) -> Any:
        """A step's metadata, padded to `descriptor`."""

    def refill(self, recorded: Any, decision: Decision) -> Any:
        """The metadata of a step that `recorded` describes, for another decision."""

    def padding(self, descriptor: BatchDescriptor, mode: RuntimeMode) -> Any:
        """Metadata of a step without a request, for captures."""


class MetadataBuffers:
    """The persistent buffers and the two ways to fill them: from a schedule, or with padding.

    The copies to them read staging memory, late if a step is in flight: `ReferenceEngine.copied`.
    """

    def __init__(
        self, *, max_rows: int, max_blocks: int, device: torch.device, triton: bool = False
    ) -> None:
        requests = max_rows + 1  # the last one is padding
        shapes = {
            "slot_mapping": (max_rows,),
            "block_table": (requests, max_blocks),
            "seq_lens": (requests,),
            "query_start_loc": (requests + 1,),
        }
        self.triton = triton
        self.tensors = {
            name: torch.zeros(shape, dtype=torch.int64, device=device)
            for name, shape in shapes.items()
        }
        self._staging = [np.zeros(shape, dtype=np.int64) for shape in shapes.values()]

    def fill(
        self, schedule: StepSchedule, blocks: BlockManager, descriptor: BatchDescriptor
    ) -> AttentionMetadata:
        """Write a step's data, padded to `descriptor`, and return the views it runs with."""
        host = slots, table, lens, starts = self._padding(descriptor)
        token = 0
        for row, share in enumerate(schedule.shares):
            stop = token + share.query_len
            slots[token:stop] = blocks.slots(share.request.id, share.start, share.context_len)
            own_blocks = blocks.table(share.request.id)
            table[row, : len(own_blocks)] = own_blocks
            lens[row] = share.context_len
            starts[row + 1] = token = stop
        return self._upload(
            host,
            decode=schedule.is_decode,
            query_lens=tuple(share.query_len for share in schedule.shares),
            context_lens=tuple(share.context_len for share in schedule.shares),
        )

    def refill(self, recorded: AttentionMetadata, decision: Decision) -> AttentionMetadata:
        """Write what `recorded` kept of a step, padded for another decision."""
        host = self._padding(decision.descriptor)
        for staging, rows in zip(host, recorded.tensors, strict=True):
            staging[tuple(map(slice, rows.shape))] = rows.numpy(force=True)
        return self._upload(
            host,
            decode=recorded.decode,
            query_lens=recorded.query_lens,
            context_lens=recorded.context_lens,
        )

    def padding(self, descriptor: BatchDescriptor, mode: RuntimeMode) -> AttentionMetadata:
        """Metadata of a step without one real request, for the dummy runs of a capture.

        It selects the attention code that steps of this runtime mode use: of plain code, only
        that for decode steps runs in FULL graphs.
        """
        decode = mode == RuntimeMode.FULL
        host = self._padding(descriptor)
        return self._upload(host, decode=decode, query_lens=(), context_lens=())

    def _padding(self, descriptor: BatchDescriptor) -> list[np.ndarray[Any, Any]]:
        """Staging memory of the size that `descriptor` states, filled with padding."""
        tokens = descriptor.num_tokens
        requests = 1 + (descriptor.num_reqs or tokens)
        sizes = tokens, requests, requests, requests + 1
        padding = NO_SLOT if self.triton else DUMP_SLOT, DUMP_BLOCK, 0, tokens
        staging = zip(self._staging, sizes, padding, strict=True)
        host = []
        for array, size, value in staging:
            array[:size] = value
            host.append(array[:size])
        host[-1][0] = 0
        return host

    def _upload(
        self,
        host: list[np.ndarray[Any, Any]],
        *,
        decode: bool,
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
    ) -> AttentionMetadata:
        """Copy to the device."""
        tensors = {
            name: buffer[: len(rows)].copy_(staged(torch.from_numpy(rows), buffer.device), True)
            for (name, buffer), rows in zip(self.tensors.items(), host, strict=True)
        }
        return AttentionMetadata(
            decode=decode,
            triton=self.triton,
            query_lens=query_lens,
            context_lens=context_lens,
            **tensors,
        )


def staged(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host`, or for a GPU a pinned copy of it: a non-blocking copy to the device can read it after
    `host` was reused. torch keeps pinned memory until the device has read it."""
    return host.pin_memory() if device.type == "cuda" else host


def uploaded(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """`values` on a device, for which the host does not wait."""
    return staged(torch.tensor(values, dtype=dtype), device).to(device, non_blocking=True)


def downloaded(values: torch.Tensor) -> Callable[[], list[int]]:
    """Start to copy `values` (rows,) to the host. The function returned waits for that copy alone,
    not for what the device was given after it."""
    if not values.is_cuda:
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.current_stream(values.device).record_event()

    def read() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return read
