"""What an engine tells about its steps, and the clock that it tells it by."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ... import Decision, Events
from .scheduler import Request, StepSchedule


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


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: `num_tokens` real rows ran as `padded_tokens` rows, in `seconds`."""

    mode: str
    num_tokens: int
    padded_tokens: int
    num_reqs: int
    num_preempted: int
    seconds: float


class ServingLog:
    """What an engine did: steps in order, and for each request when its tokens came, in seconds.

    `first_token_at` and `first_answer_at` are seconds from the start of the process to the first
    token and to the first request that was complete.
    """

    def __init__(self, clock: Clock) -> None:
        self.steps: list[StepRecord] = []
        self.token_times: dict[int, list[float]] = {}
        self.first_token_at: float | None = None
        self.first_answer_at: float | None = None
        self._clock = clock
        self._began = 0.0

    def began(self) -> None:
        """A step begins."""
        self._began = self._clock.now()

    def ended(
        self, schedule: StepSchedule, decision: Decision, completed: Sequence[Request]
    ) -> None:
        """A step has run and its tokens are in its requests."""
        now = self._clock.now()
        self.steps.append(
            StepRecord(
                mode=decision.mode.name,
                num_tokens=schedule.num_tokens,
                padded_tokens=decision.descriptor.num_tokens,
                num_reqs=len(schedule.shares),
                num_preempted=len(schedule.preempted),
                seconds=now - self._began,
            )
        )
        for request in (share.request for share in schedule.shares):
            if generated := len(request.tokens) - request.num_prompt:
                times = self.token_times.setdefault(request.id, [])
                times.extend([now] * (generated - len(times)))
        if self.first_token_at is None and self.token_times:
            self.first_token_at = Events.process_seconds()
        if self.first_answer_at is None and completed:
            self.first_answer_at = Events.process_seconds()
