"""The reference engine: serves requests step by step on a prepared model.

It is as small as an engine can be and shows how to use the library. In each step it describes the
batch, receives the mode and the padded descriptor, builds metadata for that descriptor, and runs
with the real rows. The library handles padding, graphs and static buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ... import Batch, BatchDescriptor, Decision, PreparedModel, Ranks
from .defragmenter import Defragmenter
from .metadata import Buffers, downloaded, uploaded
from .sampler import Sampler
from .scheduler import Request, Scheduler, StepSchedule
from .serving_log import Clock, ServingLog


class ReferenceEngine:
    """Serves with one prepared model, and moves KV-cache blocks with `defragmenter` if it has one.

    `run`, the prepared model's at first, may be replaced. With `ranks`, which are set after the
    engine is made, these serve in step with each other.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        logits: Callable[[torch.Tensor], torch.Tensor],
        scheduler: Scheduler,
        buffers: Buffers,
        clock: Clock,
        defragmenter: Defragmenter | None = None,
    ) -> None:
        self.prepared = prepared
        self.logits = logits
        self.scheduler = scheduler
        self.buffers = buffers
        self.clock = clock
        self.defragmenter = defragmenter
        self.run: Callable[..., Any] = prepared.run
        self.ranks: Ranks | None = None
        self.log = ServingLog(clock)
        self.device = next(iter(buffers.tensors.values())).device
        self.sampler = Sampler(self.device)
        self.copied = prepared.copies_done()
        """Of the last step: from then on the host may fill staging memory again."""
        self._staging = torch.zeros(
            4, scheduler.max_num_tokens, dtype=torch.int64, pin_memory=self.device.type == "cuda"
        )

    def serve(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Serve requests in the order of their arrival; yields after each step what it completed.

        Arrivals count from the first step: startup is not part of a request's waiting time. Time
        in which nothing runs and nothing has arrived yet is skipped; it is used for shadow steps.
        """
        self.clock.start()
        arriving = deque(requests)
        while self._work_left(bool(arriving) or not self.scheduler.idle):
            if arriving and self.scheduler.idle and arriving[0].arrival > self.clock.now():
                self.prepared.parts.proof.idle()
                self.clock.skip_to(arriving[0].arrival)
            while arriving and arriving[0].arrival <= self.clock.now():
                self.scheduler.add(arriving.popleft())
            yield self.step()

    def step(self) -> list[Request]:
        """Run one step; returns the requests it completed."""
        self.log.began()
        schedule, decision, inputs, metadata = self.next_step()
        hidden = self.run(decision, *inputs, metadata=metadata)
        self.copied = self.prepared.copies_done()
        tokens = self.sampled(hidden, schedule, decision.descriptor)
        completed = self.scheduler.finish(schedule, downloaded(tokens)())
        self.log.ended(schedule, decision, completed)
        return completed

    def next_step(self) -> tuple[StepSchedule, Decision, tuple[torch.Tensor, ...], Any]:
        """The next step's inputs and metadata, on their way to the device."""
        self.copied.synchronize()
        if self.defragmenter is not None and self.defragmenter.is_due:
            self.prepared.reads_done().synchronize()  # steps in flight find their blocks
            self.defragmenter.run()
        schedule = self.scheduler.schedule()
        decision = self.dispatch(self.batch(schedule))
        metadata = self.buffers.fill(schedule, self.scheduler.blocks, decision.descriptor)
        return schedule, decision, self.inputs(schedule, decision.descriptor), metadata

    def _work_left(self, here: bool) -> bool:
        """Whether any data-parallel rank has requests; the others run steps without tokens."""
        if self.ranks is None:
            return here
        return any(answer["left"] for answer in self.ranks.exchange("work", {"left": here}))

    def dispatch(self, batch: Batch) -> Decision:
        """Dispatch the step. Data-parallel ranks all use the graph of the largest batch: it is
        decode of one query length, or of lengths up to a bound, if those of all ranks are."""
        if self.ranks is None:
            return self.prepared.dispatch(batch)
        busy = [each for each in self.ranks.exchange("step", asdict(batch)) if each["num_tokens"]]
        decode = bool(busy) and all(each["is_decode"] for each in busy)
        lengths = {each["query_len"] for each in busy}
        most: dict[str, int] = {
            name: max((each[name] or 0 for each in busy), default=0)
            for name in ("num_tokens", "num_reqs", "num_loras", "max_query_len")
        }
        common = Batch(
            most["num_tokens"],
            most["num_reqs"],
            is_decode=decode,
            query_len=lengths.pop() if decode and len(lengths) == 1 else None,
            num_loras=most["num_loras"],
            max_query_len=most["max_query_len"] if decode else None,
        )
        decision = self.prepared.dispatch(common)
        return self.prepared.dispatcher.follow(decision.graph_index, batch)

    def batch(self, schedule: StepSchedule) -> Batch:
        batch = to_batch(schedule)
        if isinstance(self.prepared.config.inputs, tuple):
            form = 0 if image_rows(schedule) is None else 1
            batch = replace(batch, axes={"form": form})
        return batch

    def inputs(
        self, schedule: StepSchedule, descriptor: BatchDescriptor
    ) -> tuple[torch.Tensor, ...]:
        """The model's inputs, int64: ids and positions of the real rows, and with LoRA the index
        tensors: each row's place among the active adapters (-1: none), and these adapters. Behind
        them rows of images, if the step has any."""
        shares = schedule.shares
        ids = [token for share in shares for token in share.tokens]
        positions = [at for share in shares for at in range(share.start, share.context_len)]
        inputs = [ids, positions]
        if "lora_rows" in self.prepared.config.inputs:
            adapters = active_adapters(schedule)
            places = {adapter: place for place, adapter in enumerate(adapters)}
            used = [share.request.lora for share in shares for _ in share.tokens]
            rows = [-1 if adapter is None else places[adapter] for adapter in used]
            inputs += [rows, adapters]
        images = image_rows(schedule)
        return tuple(
            staging[: len(each)]
            .copy_(torch.tensor(each, dtype=torch.int64))
            .to(self.device, copy=True, non_blocking=True)
            for staging, each in zip(self._staging, inputs, strict=False)
        ) + (() if images is None else (images.to(self.device),))

    def sampled(
        self, hidden: torch.Tensor, schedule: StepSchedule, descriptor: BatchDescriptor
    ) -> torch.Tensor:
        """The next token of each sampled row, (sampled rows,) on the device."""
        rows = uploaded(self.sampled_rows(schedule, descriptor), self.device)
        draws = [
            (share.request.sampling, place)
            for share in schedule.shares
            if share.samples
            for place in range(share.context_len - len(share.drafts), share.context_len + 1)
        ]
        return self.sampler.sample(self.logits(hidden[rows]), draws)

    def sampled_rows(self, schedule: StepSchedule, descriptor: BatchDescriptor) -> list[int]:
        """The rows from which next tokens are sampled: of the last known tokens and of drafts."""
        rows, end = list[int](), 0
        for share in schedule.shares:
            end += share.query_len
            if share.samples:
                rows += range(end - 1 - len(share.drafts), end)
        return rows


def to_batch(schedule: StepSchedule) -> Batch:
    """What the library needs to know about a step. The base model counts as an adapter where it
    shares the step with others."""
    decode, lengths = schedule.is_decode, {share.query_len for share in schedule.shares}
    adapters = active_adapters(schedule)
    with_base = any(share.request.lora is None for share in schedule.shares)
    return Batch(
        num_tokens=schedule.num_tokens,
        num_reqs=len(schedule.shares),
        is_decode=decode,
        query_len=next(iter(lengths)) if decode and len(lengths) == 1 else None,
        num_loras=len(adapters) + with_base if adapters else 0,
        max_query_len=max(lengths) if decode and lengths else None,
    )


def image_rows(schedule: StepSchedule) -> torch.Tensor | None:
    """For each token of a step the row of an image, or zeros; None if no token has one."""
    rows = [(share, share.request.image_rows) for share in schedule.shares]
    size = next((r.shape[1] for share, r in rows if r is not None and share.start < len(r)), None)
    if size is None:
        return None
    result, end = torch.zeros(schedule.num_tokens, size), 0
    for share, own in rows:
        if own is not None:
            part = own[share.start : share.context_len]
            result[end : end + len(part)] = part
        end += share.query_len
    return result


def active_adapters(schedule: StepSchedule) -> list[int]:
    """The LoRA adapters of a step, ascending."""
    adapters = {share.request.lora for share in schedule.shares}
    return sorted(adapter for adapter in adapters if adapter is not None)
