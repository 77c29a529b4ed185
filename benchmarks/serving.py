"""Serving benchmarks: the reference engine, or any engine behind an OpenAI-compatible URL.

`measure_engine` serves one load with each graph mode and strategy in turn, round after round, so
that what the machine does meanwhile reaches all of them alike.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from piecegraph.errors import InvalidSetting, ToolMissing
from piecegraph.tools.engine.scheduler import Request
from piecegraph.tools.report.output import Output
from piecegraph.tools.serve.options import RunOptions
from piecegraph.tools.serve.run import Service, start_service

from .load import TimedRequest

REQUEST_TIMEOUT = 600
PLOTS = (".pdf", ".png", ".svg")


def measure_engine(
    options: Sequence[RunOptions],
    loads: Sequence[Sequence[Request]],
    *,
    rounds: int,
    concurrency: int | None,
    warmup: int,
    console: Console,
    say: Callable[[str], None],
) -> Iterator[tuple[int, int, int, list[TimedRequest]]]:
    """Number of options, of load, of round, and the requests as served, interleaved."""
    everything = [request for load in loads for request in load]
    with ExitStack() as stack:
        services = []
        for each in options:
            say(f"starting {_name(each)}")
            started = start_service(each, everything, [], console)
            services.append(stack.enter_context(started))
        for service in services:
            serve_load(service, everything[:warmup], concurrency=None)
        for number in range(rounds):
            for which, load in enumerate(loads):
                for index, service in enumerate(services):
                    say(
                        f"round {number + 1} of {rounds}: {_name(options[index])}, load {which + 1}"
                    )
                    yield index, which, number, serve_load(service, load, concurrency=concurrency)


def _name(options: RunOptions) -> str:
    mode = options.mode.name if options.mode is not None else "default mode"
    return f"{mode} {options.strategy.name}"


def serve_load(
    service: Service, requests: Sequence[Request], *, concurrency: int | None
) -> list[TimedRequest]:
    """Serve copies of `requests`; one that arrives waits while `concurrency` others are served."""
    engine, scheduler = service.engine, service.engine.scheduler
    copies = [
        Request(each.id, list(each.tokens), each.num_generate, each.arrival) for each in requests
    ]
    served = {each.id: TimedRequest(each.num_prompt, each.arrival) for each in requests}
    engine.log.token_times.clear()
    engine.clock.start()
    arriving, in_flight = deque(copies), 0
    held: set[int] = set()
    while arriving or not scheduler.idle:
        if scheduler.idle:
            engine.clock.skip_to(arriving[0].arrival)
        while (
            arriving
            and arriving[0].arrival <= engine.clock.now()
            and (concurrency is None or in_flight < concurrency)
        ):
            request = arriving.popleft()
            # the time that the limit held a request back is not the engine's
            was_held = request.id in held
            served[request.id].sent = engine.clock.now() if was_held else request.arrival
            scheduler.add(request)
            in_flight += 1
        held |= {each.id for each in arriving if each.arrival <= engine.clock.now()}
        in_flight -= len(engine.step())
    for number, times in engine.log.token_times.items():
        served[number].tokens = list(times)
    return list(served.values())


def check_url(url: str) -> str:
    """The URL, if it is on this machine: requests never leave it. Raises InvalidSetting."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if parts.scheme != "http" or not local:
        raise InvalidSetting(
            name="--url",
            value=url,
            reason="it is not an address of this machine",
            expected="http://127.0.0.1:PORT or http://localhost:PORT, with /v1 if it has that",
        )
    return url.rstrip("/")


def measure_url(
    url: str, model: str, requests: Sequence[Request], *, concurrency: int | None
) -> list[TimedRequest]:
    """Send completions to an OpenAI-compatible server and stream the tokens.

    Prompts are token ids. A request that fails has an `error`.
    """
    served = [TimedRequest(each.num_prompt, each.arrival) for each in requests]
    free = threading.Semaphore(concurrency or len(requests) or 1)
    zero = time.perf_counter()
    threads = []
    for request, row in zip(requests, served, strict=True):
        time.sleep(max(0.0, request.arrival - (time.perf_counter() - zero)))
        free.acquire()
        row.sent = time.perf_counter() - zero
        arguments = (url, model, request, row, zero, free)
        threads.append(threading.Thread(target=_send, args=arguments, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return served


def _send(
    url: str,
    model: str,
    request: Request,
    row: TimedRequest,
    zero: float,
    free: threading.Semaphore,
) -> None:
    parts = urlsplit(url)
    body = {
        "model": model,
        "prompt": request.tokens,
        "max_tokens": request.num_generate,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT
        )
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"{parts.path}/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            row.error = f"HTTP {response.status}"
            return
        for line in response:
            text = line.strip()
            if text.startswith(b"data:") and text != b"data: [DONE]":
                choices = json.loads(text.removeprefix(b"data:")).get("choices")
                if choices and choices[0].get("text"):
                    row.tokens.append(time.perf_counter() - zero)
        connection.close()
        if not row.tokens:
            row.error = "no token"
    except (OSError, ValueError, http.client.HTTPException) as error:
        row.error = type(error).__name__
    finally:
        free.release()


def with_arrivals(requests: Sequence[Request], times: Sequence[float]) -> list[Request]:
    """The same requests, arriving at these times."""
    return [
        Request(each.id, each.tokens, each.num_generate, time)
        for each, time in zip(requests, times, strict=True)
    ]


def combinations(
    options: RunOptions, modes: Sequence[Any], strategies: Sequence[Any]
) -> list[RunOptions]:
    """The options with each graph mode and strategy; verification is off, as it takes time."""
    plain = replace(options, verify="none")
    return [
        replace(plain, mode=mode, strategy=strategy) for mode in modes for strategy in strategies
    ]


def check_plot(output: Output) -> None:
    """Raise InvalidSetting for a file with another suffix than PLOTS, and ToolMissing without
    matplotlib."""
    if output.path.suffix not in PLOTS:
        reason = "its suffix names no format of a plot"
        expected = f"a file that ends in {', '.join(PLOTS[:-1])} or {PLOTS[-1]}"
        raise InvalidSetting(name="--plot", value=str(output), reason=reason, expected=expected)
    _figure_class()


def _figure_class() -> Any:
    """matplotlib's Figure. Raises ToolMissing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ToolMissing(name="matplotlib", extra="tools") from None
    return Figure


def plot(result: dict[str, Any], path: Path) -> None:
    """Latencies, throughput and goodput against the request rate, with the spread of the rounds."""
    rows, load = result["summary"], result["load"]
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    shown = [
        ("ttft_ms", "p50", "time to first token, median, ms"),
        ("ttft_ms", "p99", "time to first token, p99, ms"),
        ("tpot_ms", "p50", "time per output token, median, ms"),
        ("tpot_ms", "p99", "time per output token, p99, ms"),
        ("output_tokens_per_second", None, "output tokens per second"),
        ("good_share", None, "requests that meet all objectives, share"),
    ]
    names = list(dict.fromkeys((row["mode"], row["strategy"]) for row in rows))
    shared = {strategy for _, strategy in names}
    figure = _figure_class()(figsize=(12, 7), layout="constrained")
    panels = [each for each in shown if rows[0][each[0]] is not None]
    for axes, (metric, part, label) in zip(figure.subplots(2, 3).flat, panels, strict=False):
        for place, (mode, strategy) in enumerate(names):
            own = [row for row in rows if (row["mode"], row["strategy"]) == (mode, strategy)]
            cells = [row[metric][part] if part else row[metric] for row in own]
            middle = [cell["median"] for cell in cells]
            spread = [
                [cell["median"] - cell["min"] for cell in cells],
                [cell["max"] - cell["median"] for cell in cells],
            ]
            apart = 0.06 * (place - (len(names) - 1) / 2)
            at = [rates.index(row["rate"]) + apart for row in own]
            title = mode if len(shared) == 1 else f"{mode} {strategy}"
            axes.errorbar(at, middle, yerr=spread, marker="o", capsize=3, label=title)
        axes.set_xticks(range(len(rates)), rates)
        top = 1.05 * axes.get_ylim()[1]
        axes.set(xlabel="requests per second", ylabel=label, ylim=(0, top))
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    figure.axes[0].legend()
    limits = [f"{name} {1000 * limit:g} ms" for name, limit in load["objectives"].items()]
    objectives = f"; objectives: {', '.join(limits)}" if limits else ""
    rounds = f"{load['rounds']} rounds: median, least and most"
    figure.suptitle(f"{load['requests']} requests at each rate, {rounds}{objectives}")
    figure.savefig(path)
