"""A second reference engine: steps in padded shapes of three dimensions.

Engines for accelerators without dynamic shapes compile and capture a bucket: a number of requests,
a query length, and blocks of context. Prompts and decodes are separate steps. The engine pads each
step to a bucket itself; a step without one is rounded up more coarsely and has no graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from typing import Any

import numpy as np
import torch

from ... import Batch, BatchDescriptor, Decision, RuntimeMode
from ...dispatch import Bucket, BucketTable, Phase
from .block_manager import DUMP_BLOCK, BlockManager
from .engine import ReferenceEngine
from .metadata import NOBODY, BucketMetadata, staged, uploaded
from .scheduler import Scheduler, StepSchedule


class BucketScheduler(Scheduler):
    """Prompts first, a few at a time; decodes in steps of their own. No preemption."""

    max_prefill_reqs = 4

    def schedule(self) -> StepSchedule:
        prompts = [request for request in self.running if not request.decoding]
        room = min(self.max_num_reqs - len(self.running), self.max_prefill_reqs - len(prompts))
        for request in list(islice(self.waiting, max(0, room))):
            self.running.append(request)
            self.waiting.remove(request)
            prompts.append(request)
        chosen = prompts[: self.max_prefill_reqs] or self.running
        shares = [self._share(request, self.max_num_tokens // len(chosen)) for request in chosen]
        for share in shares:
            if not self.blocks.grow(share.request.id, share.context_len):
                raise AssertionError("the KV cache has room for every request")
        return StepSchedule(tuple(shares), ())


def shape_of(schedule: StepSchedule, block_size: int) -> Bucket:
    """The shape of a step: requests, the longest query, blocks of context."""
    shares = schedule.shares
    if schedule.is_decode:
        return Bucket(len(shares), 1, sum(-(-share.context_len // block_size) for share in shares))
    context = max(-(-share.start // block_size) for share in shares)
    query = max(2, *(share.query_len for share in shares))  # a query length of 1 means decode
    return Bucket(len(shares), query, context)


class Buckets:
    """The buckets of both phases and the buffers of their metadata.

    `missing` says what a shape would need to have a bucket.
    """

    def __init__(
        self, table: BucketTable, missing: Callable[[Bucket], str], device: torch.device
    ) -> None:
        self.table = table
        self.missing = missing
        self.limits = table.limits
        blocks = max((self._num_blocks(bucket) for bucket in table.buckets), default=1)
        rows = self.limits.max_num_tokens
        lengths = (rows,) * 3 + (blocks,) * 3
        self._buffers = [torch.zeros(size, dtype=torch.int64, device=device) for size in lengths]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        names = (each.name for each in fields(BucketMetadata))
        return dict(zip(names, self._buffers, strict=True))

    def fill(
        self, schedule: StepSchedule, blocks: BlockManager, descriptor: BatchDescriptor
    ) -> BucketMetadata:
        """A step's metadata, padded to the bucket that `descriptor` states."""
        bucket = _bucket_of(descriptor)
        host = self._padding(bucket)
        slots, row_owner, position, ids, block_owner, block_start = host
        block = 0
        for owner, share in enumerate(schedule.shares):
            rows = slice(owner * bucket.query, owner * bucket.query + share.query_len)
            slots[rows] = blocks.slots(share.request.id, share.start, share.context_len)
            row_owner[rows] = owner
            position[rows] = range(share.start, share.context_len)
            used = -(-share.context_len // self.limits.block_size)
            ids[block : block + used] = blocks.table(share.request.id)[:used]
            block_owner[block : block + used] = owner
            block_start[block : block + used] = np.arange(used) * self.limits.block_size
            block += used
        return self._upload(host)

    def refill(self, recorded: BucketMetadata, decision: Decision) -> BucketMetadata:
        """The step's own metadata: the engine has padded it to its bucket, whatever the mode."""
        return self._upload(
            [getattr(recorded, each.name).numpy(force=True) for each in fields(recorded)]
        )

    def padding(self, descriptor: BatchDescriptor, mode: RuntimeMode) -> BucketMetadata:
        """Metadata of a step without a request, for captures."""
        return self._upload(self._padding(_bucket_of(descriptor)))

    def _num_blocks(self, bucket: Bucket) -> int:
        """Blocks that attention reads: the context, and those that a prompt fills itself."""
        if bucket.phase is Phase.DECODE:
            return max(bucket.context, 1)
        return bucket.batch * (bucket.context + self.limits.blocks(bucket.query))

    def _padding(self, bucket: Bucket) -> list[np.ndarray[Any, Any]]:
        rows, blocks = bucket.batch * bucket.query, self._num_blocks(bucket)
        size = self.limits.block_size
        return [
            np.full(length, value, dtype=np.int64)
            for length, value in (
                (rows, DUMP_BLOCK * size), (rows, NOBODY), (rows, 0),
                (blocks, DUMP_BLOCK), (blocks, NOBODY - 1), (blocks, 0),
            )
        ]  # fmt: skip

    def _upload(self, host: list[np.ndarray[Any, Any]]) -> BucketMetadata:
        """In the buffers that graphs read; larger shapes have no graph."""
        device = self._buffers[0].device
        copies = [staged(torch.from_numpy(values), device) for values in host]
        return BucketMetadata(
            *(
                buffer[: len(values)].copy_(values, non_blocking=True)
                if len(values) <= len(buffer)
                else values.to(device, non_blocking=True)
                for buffer, values in zip(self._buffers, copies, strict=True)
            )
        )


def _bucket_of(descriptor: BatchDescriptor) -> Bucket:
    axes = dict(descriptor.axes)
    query = axes.get("query", 1)
    return Bucket(descriptor.num_tokens // query, query, axes.get("context", 0))


class BucketEngine(ReferenceEngine):
    """Serves like `ReferenceEngine`, each step padded to a bucket. Its buffers are `Buckets`."""

    buffers: Buckets

    def batch(self, schedule: StepSchedule) -> Batch:
        """The padded step: its requests include those of padding."""
        table = self.buffers.table
        shape = shape_of(schedule, table.limits.block_size)
        bucket = table.pad(shape)
        if table.fallbacks[shape] == 1:
            facts = {
                "shape": tuple(shape),
                "padded": tuple(bucket),
                "missing": self.buffers.missing(shape),
            }
            self.prepared.events.emit("bucket.fallback", level=logging.WARNING, **facts)
        return Batch(
            bucket.batch * bucket.query,
            bucket.batch,
            is_decode=schedule.is_decode,
            axes={"query": bucket.query, "context": bucket.context},
        )

    def inputs(
        self, schedule: StepSchedule, descriptor: BatchDescriptor
    ) -> tuple[torch.Tensor, ...]:
        """Ids and positions of all rows of the bucket; padding is token 0 at position 0."""
        query = _bucket_of(descriptor).query
        ids, positions = [0] * descriptor.num_tokens, [0] * descriptor.num_tokens
        for owner, share in enumerate(schedule.shares):
            rows = slice(owner * query, owner * query + share.query_len)
            ids[rows] = share.tokens
            positions[rows] = range(share.start, share.context_len)
        return tuple(uploaded(each, self.device) for each in (ids, positions))

    def sampled_rows(self, schedule: StepSchedule, descriptor: BatchDescriptor) -> list[int]:
        query = _bucket_of(descriptor).query
        return [
            owner * query + share.query_len - 1
            for owner, share in enumerate(schedule.shares)
            if share.samples
        ]
