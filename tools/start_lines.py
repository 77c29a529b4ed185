"""What a start is doing, as lines: its phase, the piece that is compiled, what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..events import Event, Events

PHASES = {
    "cache.lookup": "looking into the cache",
    "bundle.load": "loading the bundle",
    "trace.dynamo": "tracing",
    "split": "splitting",
    "toolchain": "looking for the C++ compiler",
    "cache.store": "storing",
}
"""What is said of a phase of the startup while it lasts."""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM: `number` is the signal's. No KeyboardInterrupt, which typer swallows."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.kept = ""
        """What remains of the work."""


@contextmanager
def start_lines(events: Events, show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` for each phase and piece of the starts that report to `events`."""
    jobs = done = 0

    def enter(phase: str) -> None:
        if phase in PHASES:
            show(PHASES[phase])

    def hear(event: Event) -> None:
        nonlocal jobs, done
        facts = event.facts
        match event.name:
            case "compile.jobs":
                jobs, done = facts["jobs"], 0
                show(f"compiling {jobs} pieces, {facts['stored']} from the cache")
            case "compile.start":
                low, high = facts["range"]
                show(f"compiling piece {done + 1} of {jobs}, for {low} to {high} tokens")
            case "compile.end":
                done += 1
                low, high = facts["range"]
                show(f"compiled piece {done} of {jobs}, for {low} to {high} tokens")
            case "cache.wait" if "layer" in facts:
                show(f"waiting for another machine that compiles this model, in {facts['layer']}")
            case "cache.wait":
                show("waiting for another process that compiles this model")

    events.phase_listeners.append(enter)
    events.listeners.append(hear)
    try:
        yield
    finally:
        events.phase_listeners.remove(enter)
        events.listeners.remove(hear)
