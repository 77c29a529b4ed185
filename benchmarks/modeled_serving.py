"""Serving with modeled times: real scheduling, dispatch and capture strategy, but no model.

The times of steps and captures are constants in this file, not measurements. A simulated clock
that only these times advance replaces the wall clock. So strategies can be compared without a GPU.
"""

from __future__ import annotations

import io
from collections import deque
from dataclasses import dataclass, field

from rich.console import Console

from ... import CaptureStrategy, Config, Dispatcher, GraphMode, RuntimeMode
from ...dispatch import default_capture_sizes, make_plan
from ...runtime.backends.ownership import Ownership
from ...runtime.backends.replay import ReplayBackend
from ...runtime.capture.recording import Recording
from ...runtime.capture.session import CaptureSession
from ...runtime.records import CaptureRecord, Records
from ...runtime.strategy.capturer import Capturer
from ...runtime.strategy.ranks import single_rank
from ..engine.block_manager import BlockManager
from ..engine.engine import to_batch
from ..engine.scheduler import Request, Scheduler
from ..serve.options import RunOptions, read_run_options
from ..serve.report import between_tokens
from ..serve.requests import read_requests
from ..serve.run import serve, start_service

CAPTURE_S = 0.06
"""One capture with the run before it; logs of an 8B model show 0.05 to 0.07."""

STEP_S = {RuntimeMode.FULL: 0.008, RuntimeMode.PIECEWISE: 0.010, RuntimeMode.NONE: 0.016}
"""The fixed part of a step; without graphs the host's launches take longer than the device."""

TOKEN_S = 0.00003
GRAPH_BYTES = 2 << 20
TOKEN_BYTES = 64 << 10
"""Bytes of a graph, and of activations for each token of a mode's largest size."""


@dataclass
class ServingResult:
    """Times in seconds: until the engine is ready, from arrivals to first tokens, between tokens,
    and of all captures. `captured` and `used` count graphs."""

    ready: float = 0.0
    first_token: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
    capture: float = 0.0
    captured: int = 0
    used: int = 0
    bytes: int = 0


@dataclass
class Clock:
    """Modeled seconds so far."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class ModeledGraphs:
    """Graphs that cost modeled time and bytes and contain nothing."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._pooled: set[RuntimeMode] = set()

    def record(self, graph_index: int, session: CaptureSession) -> Recording:
        entry = self._dispatcher.plan.entries[graph_index]
        self._clock.now += CAPTURE_S
        opening = 0 if entry.mode in self._pooled else TOKEN_BYTES * entry.descriptor.num_tokens
        self._pooled.add(entry.mode)
        recording = Recording(f"graph {graph_index}", [], [], Ownership())
        recording.seconds, recording.bytes = CAPTURE_S, GRAPH_BYTES + opening
        return recording

    def install(self, graph_index: int, recording: Recording) -> None:
        self._dispatcher.set_captured(graph_index, True)

    def remove(self, graph_index: int) -> None:
        self._dispatcher.set_captured(graph_index, False)


def serve_modeled(config: Config, requests: list[Request]) -> ServingResult:
    """Start up at time 0, when requests begin to arrive, and serve them all."""
    clock, records, result = Clock(), Records(), ServingResult()
    sizes = default_capture_sizes(config.max_num_reqs, config.max_num_tokens)
    plan = make_plan(GraphMode.FULL_AND_PIECEWISE, sizes, max_num_reqs=config.max_num_reqs)
    dispatcher = Dispatcher(plan)
    graphs = ModeledGraphs(dispatcher, clock)
    capturer = Capturer(config, dispatcher, ReplayBackend(), records, graphs, single_rank, clock)
    capturer.startup()
    result.ready = clock.now
    used = _serve(config, requests, clock, dispatcher, capturer, result)
    captures = records.of(CaptureRecord)
    result.capture = sum(capture.ms for capture in captures) / 1000
    result.captured, result.used = len(captures), len(used)
    result.bytes = capturer.memory.used
    return result


def _serve(
    config: Config,
    requests: list[Request],
    clock: Clock,
    dispatcher: Dispatcher,
    capturer: Capturer,
    result: ServingResult,
) -> set[int]:
    """Serve to the end; returns the indices that steps ran in."""
    scheduler = Scheduler(
        BlockManager(1 << 16, 16),
        max_num_tokens=config.max_num_tokens,
        max_num_reqs=config.max_num_reqs,
    )
    arriving, used, last = deque(requests), set[int](), dict[int, float]()
    while arriving or not scheduler.idle:
        if scheduler.idle:
            clock.now = max(clock.now, arriving[0].arrival)
        while arriving and arriving[0].arrival <= clock.now:
            scheduler.add(arriving.popleft())
        schedule = scheduler.schedule()
        batch = to_batch(schedule)
        if capturer.active:
            capturer.before_step(batch)
        decision = dispatcher.dispatch(batch)
        used.add(decision.graph_index)
        clock.now += STEP_S[decision.mode] + TOKEN_S * decision.descriptor.num_tokens
        sampling = [share.request for share in schedule.shares if share.samples]
        for request in sampling:
            if request.id in last:
                result.inter_token.append(clock.now - last[request.id])
            else:
                result.first_token.append(clock.now - request.arrival)
            last[request.id] = clock.now
        scheduler.finish(schedule, [0] * len(sampling))
    return used - {-1}


def gpu_options(strategy: str, count: int) -> RunOptions:
    """The first `count` requests of the trace, all arriving at time 0, without compiling."""
    return read_run_options(
        model="small",
        dtype="bfloat16",
        device="cuda",
        requests=count,
        length_scale=0.2,
        strategy=strategy,
        max_num_tokens=2048,
        max_num_reqs=256,
        backend="eager",
        no_cache=True,
        verify="none",
    )


def serve_on_gpu(strategy: CaptureStrategy, count: int) -> ServingResult:
    """Start the reference engine, serve the requests, and return the measurements."""
    options = gpu_options(strategy.value, count)
    requests, console = read_requests(options), Console(file=io.StringIO())
    with start_service(options, requests, [], console) as service:
        events = service.prepared.events
        ready = sum(span.seconds for span in events.spans if span.name == "capture")
        serve(service, requests, console)
        times = service.engine.served.token_times
        captures = events.named("capture")
        used = [row for row in service.prepared.report()["dispatch"] if row["mode"] != "NONE"]
        return ServingResult(
            ready=ready,
            first_token=[ready + moments[0] for moments in times.values()],
            inter_token=between_tokens(times),
            capture=sum(event.facts["ms"] for event in captures) / 1000,
            captured=len(captures),
            used=len(used),
            bytes=sum(event.facts["bytes"] for event in captures),
        )
