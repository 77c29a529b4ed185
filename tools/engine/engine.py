"""The reference engine: serves requests step by step on a prepared model.

It is as small as an engine can be and shows how to use the library. In each step it describes the
batch, receives the mode and the padded descriptor, builds metadata for that descriptor, and runs
with the real rows. The library handles padding, graphs and static buffers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import Batch, PreparedModel
from .kv_cache import Defragmenter
from .metadata import MetadataBuffers, staged
from .sampler import Sampler
from .scheduler import Request, Schedule, Scheduler


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: `num_tokens` real rows ran as `padded_tokens` rows, in `seconds`."""

    mode: str
    num_tokens: int
    padded_tokens: int
    num_reqs: int
    num_preempted: int
    seconds: float


@dataclass(slots=True)
class Served:
    """What happened: steps in order, and for each request when its tokens came, in seconds."""

    steps: list[StepRecord] = field(default_factory=list)
    token_times: dict[int, list[float]] = field(default_factory=dict)


class Clock:
    """Seconds since the last start; the clock can skip idle time and can be paused."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Count from 0 again."""
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def skip_to(self, moment: float) -> None:
        """Advance to `moment`; a moment in the past changes nothing."""
        self._zero -= max(0.0, moment - self.now())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Pause the clock inside the context."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._zero += time.perf_counter() - before


class Engine:
    """Serves with one prepared model; `run` is its `run`, or a replacement."""

    def __init__(
        self,
        prepared: PreparedModel,
        logits: Callable[[torch.Tensor], torch.Tensor],
        scheduler: Scheduler,
        buffers: MetadataBuffers,
        *,
        clock: Clock,
        device: torch.device,
        run: Callable[..., Any],
        sampler: Sampler,
        defragmenter: Defragmenter,
    ) -> None:
        self.prepared = prepared
        self.logits = logits
        self.scheduler = scheduler
        self.buffers = buffers
        self.clock = clock
        self.device = device
        self.served = Served()
        self.run = run
        self.sampler = sampler
        self.defragmenter = defragmenter

    def serve(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Serve requests in the order of their arrival; yields after each step what it completed.

        Arrivals count from the first step: startup is not part of a request's waiting time. Time
        in which nothing runs and nothing has arrived yet is skipped.
        """
        self.clock.start()
        arriving = deque(requests)
        while arriving or not self.scheduler.idle:
            if self.scheduler.idle:
                self.clock.skip_to(arriving[0].arrival)
            while arriving and arriving[0].arrival <= self.clock.now():
                self.scheduler.add(arriving.popleft())
            yield self.step()

    def step(self) -> list[Request]:
        """Run one step; returns the requests it completed."""
        began = self.clock.now()
        schedule = self.scheduler.schedule()
        decision = self.prepared.dispatch(to_batch(schedule))
        metadata = self.buffers.fill(schedule, self.scheduler.blocks, decision.descriptor)
        hidden = self.run(decision, *self._inputs(schedule), metadata=metadata)
        sampled = self._sample(schedule, hidden)
        now = self.clock.now()
        for share in schedule.shares:
            if share.samples:
                self.served.token_times.setdefault(share.request.id, []).append(now)
        self.served.steps.append(
            StepRecord(
                mode=decision.mode.name,
                num_tokens=schedule.num_tokens,
                padded_tokens=decision.descriptor.num_tokens,
                num_reqs=len(schedule.shares),
                num_preempted=len(schedule.preempted),
                seconds=now - began,
            )
        )
        completed = self.scheduler.finish(schedule, sampled)
        self.defragmenter.run()
        return completed

    def _inputs(self, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions of the real rows, (num_tokens,) int64."""
        spans = [(share, slice(share.start, share.context_len)) for share in schedule.shares]
        ids = [token for share, span in spans for token in share.request.tokens[span]]
        positions = [position for _, span in spans for position in range(span.start, span.stop)]
        host = torch.tensor([ids, positions], dtype=torch.int64)
        on_device = staged(host, self.device).to(self.device, non_blocking=True)
        return on_device[0], on_device[1]

    def _sample(self, schedule: Schedule, hidden: torch.Tensor) -> list[int]:
        """Next tokens of the shares that sample, from their last rows only."""
        rows, params, end = [], [], 0
        for share in schedule.shares:
            end += share.query_len
            if share.samples:
                rows.append(end - 1)
                params.append(share.request.sampling)
        return self.sampler.sample(self.logits(hidden[rows]), params) if rows else []


def to_batch(schedule: Schedule) -> Batch:
    """What the library needs to know about a step."""
    return Batch(
        num_tokens=schedule.num_tokens,
        num_reqs=len(schedule.shares),
        is_decode=schedule.is_decode,
        query_len=1 if schedule.is_decode else None,
    )
