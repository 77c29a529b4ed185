"""Observers of steps, and the log of the last steps that `last_steps` reads."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ....dispatch import Batch, BatchDescriptor, Decision, Dispatcher, Reason, RuntimeMode
from ....dispatch.decision_table import NEARNESS

_MOST_KEPT = 4096

BOUNDS = tuple(scale * unit for unit in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1) for scale in (1, 2.5, 5))
"""Upper bounds of the buckets of step durations, in seconds."""


class StepObserver:
    """Observes each step of a prepared model: see `parts.log.observe`.

    Subclasses override what they need. Steps are slower while there is an observer.
    """

    tells_steps_apart = False
    """Whether each dispatch is to return a decision of its own, since an engine may dispatch
    several batches before it runs the first."""

    def dispatched(self, batch: Batch, decision: Decision) -> None:
        """`dispatch` returned `decision` for `batch`."""

    def began(
        self, decision: Decision, args: tuple[Any, ...], kwargs: Mapping[str, Any], metadata: Any
    ) -> None:
        """`run` was called and has not run anything yet."""

    def ended(self, decision: Decision, num_tokens: int, error: BaseException | None) -> None:
        """`run` returns, or raises `error`. `decision` is the one that was carried out."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step: how it ran and why.

    `runner_up` is the graph that came closest to being used, such as `FULL 8: not captured yet`;
    None if there is no other. `padding` is in tokens. `microseconds` is the host's time in `run`:
    on a GPU, kernels may still be running then. `error` names what the step raised.
    """

    mode: str
    descriptor: BatchDescriptor
    reason: str
    runner_up: str | None
    num_tokens: int
    padding: int
    microseconds: float
    error: str | None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "descriptor": self.descriptor.as_json()}


class StepLog(StepObserver):
    """The last `keep` steps, and a histogram of the durations of all steps by runtime mode."""

    bounds = BOUNDS

    def __init__(self, dispatcher: Dispatcher, keep: int) -> None:
        self.steps: deque[LoggedStep] = deque(maxlen=keep)
        self.counts = {mode.name: [0] * (len(BOUNDS) + 1) for mode in RuntimeMode}
        self.seconds = {mode.name: 0.0 for mode in RuntimeMode}
        self.dispatcher = dispatcher
        self._runners_up: dict[tuple[int, int], tuple[Decision, str | None]] = {}
        self._told: dict[int, tuple[Decision, str | None]] = {}
        """Of the last batch of each decision: others may be dispatched before its step runs."""
        self._runner_up: str | None = None
        self._began = 0.0

    def dispatched(self, batch: Batch, decision: Decision) -> None:
        # the dispatcher reuses decision objects, and makes new ones when graphs come and go
        place = id(decision), batch.num_reqs
        logged = self._runners_up.get(place)
        if logged is None:
            if len(self._runners_up) >= _MOST_KEPT:
                self._runners_up.clear()
            second = runner_up(self.dispatcher, batch, decision)
            logged = self._runners_up[place] = decision, second
        if len(self._told) >= _MOST_KEPT:
            self._told.clear()
        self._told[id(decision)] = logged

    def began(self, decision: Decision, *step: Any) -> None:
        told = self._told.get(id(decision))
        self._runner_up = told[1] if told is not None else None
        self._began = time.perf_counter()

    def ended(self, decision: Decision, num_tokens: int, error: BaseException | None) -> None:
        seconds = time.perf_counter() - self._began
        mode, descriptor = decision.mode.name, decision.descriptor
        self.counts[mode][bisect_left(BOUNDS, seconds)] += 1
        self.seconds[mode] += seconds
        self.steps.append(
            LoggedStep(
                mode,
                descriptor,
                decision.reason.value,
                self._runner_up,
                num_tokens,
                max(descriptor.num_tokens - num_tokens, 0),
                seconds * 1e6,
                type(error).__name__ if error is not None else None,
            )
        )


def runner_up(dispatcher: Dispatcher, batch: Batch, decision: Decision) -> str | None:
    """The preferred graph that came closest, with its obstacle, or else the next usable one.

    A graph that is too small is the closest one only if all are.
    """
    candidates = dispatcher.explain(batch)
    used = decision.graph_index
    chosen = next((n for n, each in enumerate(candidates) if each.graph_index == used), None)
    better = [(each, each.obstacle) for each in candidates[:chosen] if each.obstacle is not None]
    close = [each for each in better if each[1] is not Reason.ABOVE_LARGEST_SIZE]
    usable = [each for each in candidates if each.obstacle is None and each.graph_index != used]
    if close:
        closest, obstacle = max(close, key=lambda each: NEARNESS.index(each[1]))
        why = obstacle.value
    elif usable:
        closest, why = usable[0], "less preferred"
    elif better and chosen is None:
        closest, obstacle = max(better, key=lambda each: each[0].entry.descriptor.num_tokens)
        why = obstacle.value
    else:
        return None
    return f"{closest.entry.mode.name} {closest.entry.descriptor.num_tokens}: {why}"
