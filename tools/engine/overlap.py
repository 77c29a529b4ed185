"""An engine with one step in flight: while the device runs it, the host builds the next one.

How many tokens a step adds is known before it has run. So the scheduler goes on with placeholders,
the ids of the next step are taken from the sampled tokens on the device, and the host reads these
one step later. With speculation that holds for steps that sample nothing: how many drafts are
accepted decides the next batch, so a step that samples ends before the next one is scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ... import Decision
from .engine import ReferenceEngine
from .metadata import downloaded
from .scheduler import Request, StepSchedule


@dataclass(slots=True)
class InFlight:
    """A started step. `tokens` (sampled rows,) are on the device; `read` waits for them."""

    schedule: StepSchedule
    decision: Decision
    tokens: torch.Tensor
    read: Callable[[], list[int]]
    places: list[tuple[Request, int]]
    """Where each sampled token belongs among those of its request."""
    completed: list[Request] | None
    """None as long as the scheduler does not know how many tokens the step added."""


class OverlappingEngine(ReferenceEngine):
    """Serves like `ReferenceEngine` and gives the same tokens."""

    _in_flight: InFlight | None = None
    _any_requests = True
    """Whether some rank has requests: else the last steps end and none is started."""

    def step(self) -> list[Request]:
        """Start a step, then end the one before it; returns the requests that one completed."""
        self.log.began()
        before, now, completed = self._in_flight, None, list[Request]()
        if before is not None and before.completed is None:
            completed, before = self._end(before), None
        if self._any_requests and (self.ranks is not None or not self.scheduler.idle):
            now = self._start(before)
        if before is not None:
            completed = self._end(before)
        if now is not None and (self.scheduler.drafter is None or not now.places):
            # a token that is not known yet is -1 - n for the n-th that the step samples
            unknown = range(-1, -1 - len(now.places), -1)
            now.completed = self.scheduler.finish(now.schedule, unknown)
        self._in_flight = now
        return completed

    def _end(self, step: InFlight) -> list[Request]:
        """Wait for a step, and give its requests their tokens."""
        tokens = step.read()
        if step.completed is None:
            step.completed = self.scheduler.finish(step.schedule, tokens)
        else:
            for (request, place), token in zip(step.places, tokens, strict=True):
                request.tokens[place] = token
        self.log.ended(step.schedule, step.decision, step.completed)
        return step.completed

    def _start(self, before: InFlight | None) -> InFlight:
        schedule, decision, (ids, *others), metadata = self.next_step()
        if before is not None and len(before.tokens):
            ids = torch.where(ids < 0, before.tokens[(-1 - ids).clamp(min=0)], ids)
        hidden = self.run(decision, ids, *others, metadata=metadata)
        self.copied = self.prepared.copies_done()
        tokens = self.sampled(hidden, schedule, decision.descriptor)
        sampling = (share.request for share in schedule.shares if share.samples)
        places = [(request, len(request.tokens)) for request in sampling]
        return InFlight(schedule, decision, tokens, downloaded(tokens), places, None)

    def _work_left(self, here: bool) -> bool:
        self._any_requests = super()._work_left(here)
        return self._any_requests or self._in_flight is not None
