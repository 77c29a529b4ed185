"""Output of what the library does: log lines, tlparse artifacts, listeners, counters and spans.

Events are output only: what a report or a metric states is read from the typed records of a
prepared model, never from here. Names are dotted, package first: `cache.hit`, `compile.piece`,
`capture.recorded`. The log has one line per startup phase with its seconds at INFO, warnings
above, and every single decision at DEBUG.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .torch_compat.basics.structured_trace import (
    compile_unit,
    in_compile_unit,
    new_frame,
    trace_is_on,
    write_artifact,
    write_phase,
)

log = logging.getLogger("piecegraph")

KEPT = 10_000
"""Events, and spans, that an `Events` keeps; the oldest are dropped first."""
NEWEST = 4
"""Facts that are kept of each warning."""


@dataclass(frozen=True, slots=True)
class Event:
    """One decision: `at` is in seconds since the `Events` began, `facts` is JSON-able."""

    name: str
    at: float
    facts: dict[str, Any]


@dataclass(slots=True)
class Span:
    """One stretch of work; `start` and `seconds` are in seconds, `depth` counts enclosing spans.

    `phase` marks a phase of the startup. `own` is `seconds` without the phases inside of it, so
    that phases add up to the one around them. `rows` are facts of the events in a phase, by name,
    for torch's structured trace.
    """

    name: str
    start: float
    seconds: float
    depth: int
    facts: dict[str, Any] = field(default_factory=dict)
    phase: bool = False
    own: float = 0.0
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


class Events:
    """Events, spans and counters in order; safe to use from several threads.

    The newest `kept` events and spans are held; `dropped` counts the events that were dropped.
    `phases` are the spans of the startup.
    """

    def __init__(
        self, *, detailed: bool = False, kept: int = KEPT, parent: Events | None = None
    ) -> None:
        """`detailed` also keeps facts that are costly to make; see `detail`.

        Everything is passed on to `parent`, if there is one, which then logs nothing itself.
        """
        self.detailed: bool = detailed or (parent is not None and parent.detailed)
        self.parent = parent
        self.began: float = parent.began if parent is not None else time.perf_counter()
        self.events: deque[Event] = deque(maxlen=kept)
        self.spans: deque[Span] = deque(maxlen=kept)
        self.phases: deque[Span] = deque(maxlen=kept)
        self.counters: Counter[str] = Counter()
        self._warned: dict[str, tuple[int, deque[dict[str, Any]]]] = {}
        self.dropped = 0
        self.listeners: list[Callable[[Event], None]] = []
        self.phase_listeners: list[Callable[[str], None]] = []
        """Called with the name of a phase of the startup when it begins."""
        self._lock = threading.Lock()
        self._frame: int | None = None
        self._model: tuple[str, str, int] | None = None
        self._units: dict[int | None, list[str]] = {}
        self._open: threading.local = parent._open if parent is not None else threading.local()

    def emit(self, name: str, *, level: int = logging.DEBUG, **facts: Any) -> None:
        """Keep and log an event, and put it into torch's structured trace when one is on: at once,
        or at the end of the phase, where events of one name make one table."""
        if log.isEnabledFor(level):
            log.log(level, "%s%s", name, _shown(facts))
        if trace_is_on():
            phase: Span | None = getattr(self._open, "phase", None)
            if phase is None or getattr(self._open, "piece", None) is not None:
                self._trace(name, facts)
            else:
                phase.rows.setdefault(name, []).append(facts)
        self._take(Event(name, time.perf_counter() - self.began, facts), level)

    def _trace(self, name: str, payload: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Write an artifact, by default as one of the model."""
        if self._frame is None or in_compile_unit():
            trace_artifact(name, payload)
        else:
            with compile_unit(self._frame, 0):
                trace_artifact(name, payload)

    def _take(self, event: Event, level: int) -> None:
        with self._lock:
            if level >= logging.WARNING:
                count, newest = self._warned.get(event.name, (0, deque(maxlen=NEWEST)))
                newest.append(event.facts)
                self._warned[event.name] = count + 1, newest
            self.dropped += len(self.events) == self.events.maxlen
            self.events.append(event)
        for listener in tuple(self.listeners):  # a listener may remove itself
            listener(event)
        if self.parent is not None:
            self.parent._take(event, level)

    def warnings(self) -> list[dict[str, Any]]:
        """`{event, count, newest}` of each event at WARNING and above, with its newest facts."""
        with self._lock:
            return [
                {"event": name, "count": count, "newest": list(newest)}
                for name, (count, newest) in self._warned.items()
            ]

    @property
    def wants_detail(self) -> bool:
        """Whether facts that are costly to make are wanted: for a trace, or a DEBUG log."""
        return self.detailed or trace_is_on() or log.isEnabledFor(logging.DEBUG)

    def detail(self, name: str, facts: Callable[[], dict[str, Any]]) -> None:
        """Like `emit`, for facts that are costly to make: made only where they are wanted."""
        if self.wants_detail:
            self.emit(name, **facts())

    def count(self, name: str, n: int = 1) -> None:
        """Add `n` to the counter `name`."""
        with self._lock:
            self.counters[name] += n
        if self.parent is not None:
            self.parent.count(name, n)

    @contextmanager
    def span(self, name: str, *, level: int = logging.DEBUG, **facts: Any) -> Iterator[Span]:
        """Time a stretch of work; the span is kept also when the work raises.

        At its end one line with the seconds is logged: at `level` INFO for a phase of the startup,
        those of its own. The outermost phase logs all of its seconds, and what no phase inside of
        it has.
        """
        depth = getattr(self._open, "depth", 0)
        outer: Span | None = getattr(self._open, "phase", None)
        self._open.depth = depth + 1
        start = time.perf_counter() - self.began
        span = Span(name, start, 0.0, depth, facts, phase=level >= logging.INFO)
        self._begin(span)
        if span.phase:
            self._open.phase = span
        try:
            yield span
        finally:
            span.seconds = time.perf_counter() - self.began - span.start
            span.own += span.seconds
            self._open.depth = depth
            if span.phase:
                self._open.phase = outer
            if span.phase and outer is not None:
                outer.own -= span.seconds
            if span.phase and trace_is_on():
                for event, rows in span.rows.items():
                    self._trace(event, rows if len(rows) > 1 else rows[0])
                of = f" of {self._model[0]}" if self._model else ""
                write_phase(name + of, span.seconds, facts)
            if log.isEnabledFor(level):
                seconds = span.seconds if outer is None else span.own
                rest = f", other: {span.own:.3f} s" if span.own < seconds else ""
                log.log(level, "%s: %.3f s%s%s", name, seconds, rest, _shown(facts))

    def past_span(self, name: str, began: float, seconds: float, **facts: Any) -> None:
        """A stretch of work elsewhere, which began at `began` by `time.perf_counter`."""
        depth = getattr(self._open, "depth", 0)
        self._begin(Span(name, began - self.began, seconds, depth, facts))

    def _begin(self, span: Span) -> None:
        with self._lock:
            self.spans.append(span)
            if span.phase:
                self.phases.append(span)
        for listener in tuple(self.phase_listeners) if span.phase else ():
            listener(span.name)
        if self.parent is not None:
            self.parent._begin(span)

    @contextmanager
    def trace_unit(self, piece: int | None, name: str, where: str | None = None) -> Iterator[None]:
        """If torch is tracing, artifacts inside get a compile id of their own in tlparse's index.

        None is the model, `[1000/0]`; its piece 2 is `[1001/2]`, and `[1001/2_1]` under a second
        name. `where` is file:line. Entered again, a unit goes on.
        """
        if not trace_is_on():
            yield
            return
        file, _, line = (where or "").rpartition(":")
        title = (name, file or "?", int(line) if line.isdigit() else 0)
        if self._frame is None:
            self._frame, self._model = new_frame(), title
            new_frame()  # of the pieces
        names = self._units.setdefault(piece, [])
        started = name in names
        if not started:
            names.append(name)
        stack = (title,) if piece is None or self._model is None else (self._model, title)
        frame, part = (self._frame, 0) if piece is None else (self._frame + 1, piece)
        outer, self._open.piece = getattr(self._open, "piece", None), piece
        try:
            with compile_unit(frame, part, () if started else stack, names.index(name)):
                yield
        finally:
            self._open.piece = outer

    @staticmethod
    def process_seconds() -> float | None:
        """Seconds since the start of this process; None on systems other than Linux."""
        if sys.platform != "linux":
            return None
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")

    def named(self, name: str) -> list[Event]:
        """The kept events called `name`, oldest first."""
        return [event for event in tuple(self.events) if event.name == name]


def _shown(facts: dict[str, Any]) -> str:
    """Facts as ` name=value …`, each cut to 200 characters."""
    return "".join(f" {name}={str(value)[:200]}" for name, value in facts.items())


def trace_artifact(
    name: str, payload: dict[str, Any] | list[dict[str, Any]] | Callable[[], str]
) -> None:
    """Write `payload` to torch's structured trace as `piecegraph_<name>` if torch is tracing.

    Facts are shown as JSON; a function gives a text, and is called only if there is a trace.
    """
    if not trace_is_on():
        return
    label = "piecegraph_" + name.replace(".", "_")
    if callable(payload):
        write_artifact(label, "string", payload)
    else:
        write_artifact(label, "json", lambda: json.dumps(payload, default=str))
