"""Forecasts the bytes of all graphs from two or three probe captures per mode.

Graphs share a pool: the largest size opens it, and each further one adds what it cannot reuse.
Both are measured, in the order of the real captures but in a temporary pool, and a line
a + b · size is fitted to what is added. Cost per graph times the number of graphs would count the
shared part once for every graph.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...dispatch import DispatchPlan, RuntimeMode
from ...errors import CaptureFailed
from ...events import Events
from ..backends.protocol import GraphBackend
from ..capture.recording import Recording
from ..capture.session import CaptureSession, capture_session

RecordGraph = Callable[[int, CaptureSession], Recording]


@dataclass(frozen=True, slots=True)
class ModeForecast:
    """Bytes of one mode: `opening` for the `largest` size, `base` + `per_token` · size for each
    further one. The opening was measured after other modes had taken `beneath` bytes, which it
    could reuse."""

    largest: int
    opening: int
    base: float = 0.0
    per_token: float = 0.0
    beneath: int = 0

    def growth(self, num_tokens: int) -> int:
        """Bytes that a size adds when a larger one is captured."""
        return max(0, math.ceil(self.base + self.per_token * num_tokens))

    def opens_with(self, num_tokens: int) -> int:
        """Bytes of a size that is captured first: all but the fixed part shrinks with the size."""
        shrinking = max(0.0, self.opening - self.base) * num_tokens / self.largest
        return max(self.growth(num_tokens), math.ceil(self.base + shrinking))

    def alone(self, num_tokens: int) -> int:
        """The most bytes that a size needs if it can reuse nothing."""
        return math.ceil((self.opening + self.beneath) * num_tokens / self.largest)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of each mode that has sizes."""

    modes: Mapping[RuntimeMode, ModeForecast]

    def growth(self, mode: RuntimeMode, num_tokens: int, *, first: bool, used: int) -> int:
        """Bytes of one more graph in a pool of `used` bytes; `first` if the mode has none yet.

        If less is captured before it than in the probe, it can reuse less.
        """
        of_mode = self.modes[mode]
        probed = of_mode.opens_with(num_tokens) if first else of_mode.growth(num_tokens)
        return max(probed, of_mode.alone(num_tokens) - used)

    def total(self, mode: RuntimeMode, sizes: Iterable[int]) -> int:
        """Bytes of all `sizes` of a mode, captured largest first."""
        of_mode = self.modes[mode]
        ordered = sorted(sizes, reverse=True)
        return sum(map(of_mode.opens_with, ordered[:1])) + sum(map(of_mode.growth, ordered[1:]))

    def as_json(self) -> dict[str, Any]:
        return {
            mode.name: [of.largest, of.opening, of.base, of.per_token, of.beneath]
            for mode, of in self.modes.items()
        }

    @classmethod
    def worst(cls, forecasts: Sequence[dict[str, Any]]) -> Forecast:
        """The largest of each number, over the `as_json` of all ranks."""
        return cls(
            {
                RuntimeMode[name]: ModeForecast(
                    *map(max, zip(*(f[name] for f in forecasts), strict=True))
                )
                for name in forecasts[0]
                if all(name in forecast for forecast in forecasts)
            }
        )


def forecast_memory(
    backend: GraphBackend, plan: DispatchPlan, indices: Iterable[int], record: RecordGraph,
    events: Events,
) -> tuple[Forecast, list[int]]:  # fmt: skip
    """Probe the largest, a middle and the smallest of `indices` of each mode.

    Returns the forecast and the graphs whose probe failed, which need not be tried again. Probing
    takes the memory of these captures; all of it is freed on return.
    """
    by_mode: dict[RuntimeMode, list[int]] = {}
    for graph_index in indices:
        by_mode.setdefault(plan.entries[graph_index].mode, []).append(graph_index)
    pool, failed = backend.new_pool(), list[int]()
    recordings: list[Recording] = []
    modes = {}
    with events.span("forecast", level=logging.INFO):
        with capture_session(backend, pool, events) as session:
            for mode, candidates in by_mode.items():
                beneath = sum(recording.bytes for recording in recordings)
                measured = _probe(candidates, record, session, recordings, failed)
                sizes = [
                    (plan.entries[graph_index].descriptor.num_tokens, n)
                    for graph_index, n in measured
                ]
                if sizes:
                    modes[mode] = replace(fit(sizes), beneath=beneath)
        for recording in recordings:
            recording.release()
        backend.release_pool(pool)
    return Forecast(modes), failed


def _probe(
    candidates: list[int],
    record: RecordGraph,
    session: CaptureSession,
    recordings: list[Recording],
    failed: list[int],
) -> list[tuple[int, int]]:
    """(graph_index, bytes) of the largest that can be captured, a middle one and the smallest."""
    measured: list[tuple[int, int]] = []
    left = list(candidates)
    while left:
        graph_index = (
            left[0] if not measured else left[len(left) // 2] if len(measured) == 1 else left[-1]
        )
        try:
            recordings.append(record(graph_index, session))
        except CaptureFailed:
            failed.append(graph_index)
            left.remove(graph_index)
            continue
        measured.append((graph_index, recordings[-1].bytes))
        left = left[left.index(graph_index) + 1 :]
        if len(measured) == 3:
            break
    return measured


def fit(measured: Sequence[tuple[int, int]]) -> ModeForecast:
    """The forecast from (size, bytes) of one to three captures, the largest first."""
    (largest, opening), *rest = measured
    if not rest:
        return ModeForecast(largest, opening)
    if len(rest) == 1:
        return ModeForecast(largest, opening, base=rest[0][1])
    (n, high), (m, low) = rest
    slope = max(0.0, (high - low) / (n - m))
    return ModeForecast(largest, opening, high - slope * n, slope)
