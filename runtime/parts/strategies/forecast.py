"""Forecasts the bytes of all graphs from a few probe captures per mode.

Graphs share a pool. A graph takes bytes of its own, and working memory that all graphs of the pool
reuse, so a set of graphs takes the largest working memory plus the sum of the own bytes. Probes in
temporary pools measure both: captures from the largest size to the smallest add their own bytes to
the working memory of the largest; the smallest captured alone has its own working memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from ....dispatch import DispatchPlan, RuntimeMode
from ....events import Events
from ...backends.protocol import GraphBackend
from ...capture.captures import record_on_all_ranks
from ...capture.recording import Recording
from ...capture.session import CaptureSession, capture_session
from ...core.exchange import CaptureAgreement, Exchange

RecordGraph = Callable[[int, CaptureSession], Recording]

Graph = tuple[RuntimeMode, int]
"""A graph as the forecast sees it: mode and padded tokens."""

Points = tuple[tuple[int, float], ...]
"""(size, bytes) in ascending order of size."""


@dataclass(frozen=True, slots=True)
class ModeForecast:
    """Bytes of the graphs of one mode, measured at a few sizes and interpolated between them.

    `own` bytes are added by each graph, `shared` bytes are reused by all. `error` is the number of
    bytes by which test probes differ from the line through the other probes.
    """

    own: Points
    shared: Points
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of each mode that has graphs."""

    modes: Mapping[RuntimeMode, ModeForecast]

    def own(self, graph: Graph) -> float:
        """Bytes that a graph adds regardless of what else is captured."""
        return _interpolate(self.modes[graph[0]].own, graph[1])

    def shared(self, graphs: Iterable[Graph]) -> float:
        """Bytes of working memory, the most that one of `graphs` needs."""
        needs = (_interpolate(self.modes[mode].shared, n) for mode, n in graphs)
        return max(needs, default=0.0)

    def total(self, graphs: Collection[Graph]) -> int:
        """Bytes of all `graphs` together."""
        return math.ceil(self.shared(graphs) + sum(map(self.own, graphs)))

    def growth(self, graph: Graph, captured: Collection[Graph]) -> int:
        """Bytes of one more graph."""
        more = self.shared([graph]) - self.shared(captured)
        return math.ceil(max(0.0, more) + self.own(graph))

    def margin(self, graphs: Iterable[Graph]) -> int:
        """Bytes by which `total` may be wrong, judged by the test probes of each mode."""
        unmeasured = (mode for mode, n in graphs if n not in dict(self.modes[mode].own))
        return math.ceil(sum(self.modes[mode].error for mode in unmeasured))

    def corrected(self, graph: Graph, captured: Collection[Graph], num_bytes: int) -> Forecast:
        """The forecast after `graph` took `num_bytes` beside the graphs already `captured`."""
        mode, n = graph
        of_mode, before = self.modes[mode], self.shared(captured)
        own, shared = num_bytes, self.shared([graph])
        if shared > before:  # the difference to the forecast is put down to working memory
            own = min(num_bytes, math.ceil(self.own(graph)))
            shared = before + num_bytes - own
        corrected = ModeForecast(
            _with(of_mode.own, n, own), _with(of_mode.shared, n, shared), of_mode.error
        )
        return Forecast({**self.modes, mode: corrected})


def _interpolate(points: Points, n: int) -> float:
    """Bytes at size `n`: on the line between its neighbors, or beyond the ends on the last line."""
    if len(points) == 1:
        return points[0][1]
    above = next((i for i, (size, _) in enumerate(points) if size >= n), len(points) - 1)
    (low, low_bytes), (high, high_bytes) = points[max(above, 1) - 1], points[max(above, 1)]
    return max(0.0, low_bytes + (high_bytes - low_bytes) * (n - low) / (high - low))


def _with(points: Points, n: int, num_bytes: float) -> Points:
    return tuple(sorted({**dict(points), n: num_bytes}.items()))


def forecast_memory(
    backend: GraphBackend,
    plan: DispatchPlan,
    record: RecordGraph,
    events: Events,
    exchange: Exchange,
    serving: bool,
) -> Generator[float, None, tuple[Forecast, list[int]]]:
    """Probe a few sizes of each mode, at most six captures; yields the milliseconds of each.

    Returns the forecast and the graphs whose probe failed, which need not be tried again. Ranks
    exchange the outcome of each probe: it counts as the largest of theirs, and as failed if it
    failed on any, so that all run the same probes. Probing takes the memory of these captures; all
    of it is freed at the end. In `serving` steps may run between two probes, and a dummy batch that
    fails is no error.
    """
    by_mode: dict[RuntimeMode, list[int]] = {}
    for graph_index, entry in enumerate(plan.entries):
        by_mode.setdefault(entry.mode, []).append(graph_index)
    failed: list[int] = []
    modes = {}

    def probe(
        candidates: Iterable[int], most: int
    ) -> Generator[float, None, list[tuple[int, int]]]:
        """(graph_index, bytes) of the first `most` of `candidates` that can be captured."""
        pool, recordings = backend.new_pool(), list[Recording]()
        measured: list[tuple[int, int]] = []
        try:
            with ExitStack() as sessions:
                session = None
                for graph_index in candidates:
                    if len(measured) == most:
                        break
                    if session is None:
                        session = sessions.enter_context(
                            capture_session(backend, pool, events, prepare=not serving)
                        )
                    topic = f"probe of graph {graph_index}"
                    session.agreement = CaptureAgreement(exchange, topic)
                    recording, (ms, num_bytes, _) = record_on_all_ranks(
                        partial(record, graph_index, session), session, serving
                    )
                    if recording is None:
                        failed.append(graph_index)
                    else:
                        recordings.append(recording)
                        measured.append((graph_index, num_bytes))
                    if serving:
                        sessions.close()
                        session = None
                    yield ms
        finally:
            for recording in recordings:
                recording.release()
            backend.release_pool(pool)
        return measured

    def size(graph_index: int) -> int:
        return plan.entries[graph_index].descriptor.num_tokens

    for mode, candidates in by_mode.items():
        measured = yield from probe(_to_probe(candidates), 5)
        if not measured:  # not the largest, nor those beside it
            measured = yield from probe([i for i in candidates if i not in failed], 1)
        if measured:
            alone = (yield from probe([measured[-1][0]], 1)) if len(measured) > 1 else []
            modes[mode] = fit([(size(i), n) for i, n in measured], *(n for _, n in alone))
    return Forecast(modes), failed


def _to_probe(candidates: Sequence[int]) -> list[int]:
    """The largest, the smallest and those at each quarter between them, in their order."""
    last = len(candidates) - 1
    return [candidates[place] for place in sorted({last * quarter // 4 for quarter in range(5)})]


def fit(measured: Sequence[tuple[int, int]], alone: int | None = None) -> ModeForecast:
    """The forecast from (size, bytes) of captures into one pool, the largest first.

    `alone` is the bytes of the smallest in a pool of its own. With five captures the second and
    the fourth are test probes: they are compared with the line through the third and the fifth.
    """
    (largest, opening), *rest = measured
    if not rest:
        return ModeForecast(((largest, 0.0),), ((largest, float(opening)),))
    added: Points = ()
    for size, num_bytes in rest:  # LoRA cases and axes have several graphs of one size
        added = _with(added, size, max(float(num_bytes), dict(added).get(size, 0.0)))
    own = _with(added, largest, min(float(opening), _interpolate(added, largest)))
    smallest, of_smallest = added[0]
    working = opening - dict(own)[largest]
    of_least = working * smallest / largest if alone is None else max(0.0, alone - of_smallest)
    error = 0.0
    if len(added) == 4:
        line = (added[0], added[2])
        error = max(abs(num_bytes - _interpolate(line, n)) for n, num_bytes in added[1::2])
    return ModeForecast(own, _with(((smallest, of_least),), largest, working), error)
