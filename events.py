"""The one way out for decisions: log line, tlparse artifact, counter and timeline span.

Each prepared model has one `Events`; rooms are handed it and never format output of their own.
Names are dotted, room first: `cache.hit`, `compile.piece`, `capture.recorded`. The log has one line
a phase with its seconds at INFO, warnings above, and every single decision at DEBUG.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .torch_compat.structured_trace import trace_is_on, write_artifact

log = logging.getLogger("piecegraph")


@dataclass(frozen=True, slots=True)
class Event:
    """One decision: `at` is in seconds since the `Events` began, `facts` is JSON-able."""

    name: str
    at: float
    facts: dict[str, Any]


@dataclass(slots=True)
class Span:
    """One stretch of work; `start` and `seconds` are in seconds, `depth` counts enclosing spans."""

    name: str
    start: float
    seconds: float
    depth: int
    facts: dict[str, Any] = field(default_factory=dict)


class Events:
    """What one prepared model decided and did, in order; safe to use from several threads."""

    def __init__(self, *, detailed: bool = False) -> None:
        """`detailed` keeps also the facts that cost something to make; see `detail`."""
        self.detailed = detailed
        self.began = time.perf_counter()
        self.events: list[Event] = []
        self.spans: list[Span] = []
        self.counters: Counter[str] = Counter()
        self.listeners: list[Callable[[Event], None]] = []
        self._lock = threading.Lock()
        self._open = threading.local()

    def emit(self, name: str, *, level: int = logging.DEBUG, **facts: Any) -> None:
        """Record a decision, log it, and put it into torch's structured trace when one is on."""
        event = Event(name, time.perf_counter() - self.began, facts)
        with self._lock:
            self.events.append(event)
        if log.isEnabledFor(level):
            log.log(level, "%s%s", name, _shown(facts))
        trace_artifact(name, facts)
        for listener in tuple(self.listeners):  # one may take itself off the list
            listener(event)

    def detail(self, name: str, facts: Callable[[], dict[str, Any]]) -> None:
        """Like `emit`, for facts that cost something: made only for a trace or a DEBUG log."""
        if self.detailed or trace_is_on() or log.isEnabledFor(logging.DEBUG):
            self.emit(name, **facts())

    def count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self.counters[name] += n

    @contextmanager
    def span(self, name: str, *, level: int = logging.DEBUG, **facts: Any) -> Iterator[Span]:
        """Time a stretch of work; the span is kept also when the work raises.

        At its end one line with the seconds is logged: at `level` INFO for a phase of the startup.
        """
        depth = getattr(self._open, "depth", 0)
        self._open.depth = depth + 1
        span = Span(name, time.perf_counter() - self.began, 0.0, depth, facts)
        with self._lock:
            self.spans.append(span)
        try:
            yield span
        finally:
            span.seconds = time.perf_counter() - self.began - span.start
            self._open.depth = depth
            if log.isEnabledFor(level):
                log.log(level, "%s: %.3f s%s", name, span.seconds, _shown(facts))

    def named(self, name: str) -> list[Event]:
        """The events called `name`, oldest first."""
        return [event for event in self.events if event.name == name]


def _shown(facts: dict[str, Any]) -> str:
    """Facts as ` name=value …`, each cut where it would fill the screen."""
    return "".join(f" {name}={str(value)[:200]}" for name, value in facts.items())


def trace_artifact(name: str, payload: dict[str, Any] | Callable[[], str]) -> None:
    """Write `payload` to torch's structured trace as `piecegraph_<name>` if torch is tracing.

    A dict is shown as JSON; a function gives a text, and is called only if there is a trace.
    """
    if not trace_is_on():
        return
    label = "piecegraph_" + name.replace(".", "_")
    if callable(payload):
        write_artifact(label, "string", payload)
    else:
        write_artifact(label, "json", lambda: json.dumps(payload, default=str))
