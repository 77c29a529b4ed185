"""An engine with one step in flight: while the device runs it, the host builds the next one.

How many tokens a step adds is known before it has run. So the scheduler goes on with placeholders,
the ids of the next step are taken from the sampled tokens on the device, and the host reads these
one step later. Speculation cannot overlap: how many drafts are accepted decides the next batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import Decision
from .engine import Engine
from .scheduler import Request, Schedule


@dataclass(slots=True)
class InFlight:
    """A step that was started. `tokens` (sampled rows,) are on the device.

    After `done`, all that it reads may be rewritten: a step that samples nothing must be waited for
    as well, or its staging memory would be filled again too early.
    """

    schedule: Schedule
    decision: Decision
    tokens: torch.Tensor
    places: list[tuple[Request, int]]
    """Where each sampled token belongs among those of its request."""
    completed: list[Request]
    done: Any
    """Of `PreparedModel.reads_done`."""


class OverlappingEngine(Engine):
    """Serves like `Engine` and gives the same tokens."""

    _in_flight: InFlight | None = None

    def step(self) -> list[Request]:
        """Start a step, then end the one before it; returns the requests that one completed."""
        self.log.began()
        before, now = self._in_flight, None
        if self.ranks is not None or not self.scheduler.idle:
            now = self._start(before)
        if before is not None:
            before.done.synchronize()
            for (request, place), token in zip(before.places, before.tokens.tolist(), strict=True):
                request.tokens[place] = token
            self.log.ended(before.schedule, before.decision, before.completed)
        if now is not None:
            # a token that is not known yet is -1 - n for the n-th that the step samples
            unknown = range(-1, -1 - len(now.places), -1)
            now.completed = self.scheduler.finish(now.schedule, unknown)
        self._in_flight = now
        return before.completed if before is not None else []

    def _start(self, before: InFlight | None) -> InFlight:
        schedule = self.scheduler.schedule()
        decision = self.dispatch(self.batch(schedule))
        metadata = self.buffers.fill(schedule, self.scheduler.blocks, decision.descriptor)
        ids, *others = self.inputs(schedule, decision.descriptor)
        if before is not None and len(before.tokens):
            ids = torch.where(ids < 0, before.tokens[(-1 - ids).clamp(min=0)], ids)
        hidden = self.run(decision, ids, *others, metadata=metadata)
        tokens = self.sampled(hidden, schedule, decision.descriptor)
        sampling = (share.request for share in schedule.shares if share.samples)
        places = [(request, len(request.tokens)) for request in sampling]
        done = self.prepared.reads_done()
        return InFlight(schedule, decision, tokens, places, [], done)

    def _work_left(self, here: bool) -> bool:
        return super()._work_left(here or self._in_flight is not None)
