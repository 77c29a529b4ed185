"""Shows progress of long work: a bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console

from ...events import Event, Events

LINES = 10
"""Maximum number of plain lines for one task, after the first line."""


@contextmanager
def working(console: Console, label: str) -> Iterator[None]:
    """Show that `label` is in progress, without a percentage."""
    if console.is_terminal:
        with console.status(label):
            yield
    else:
        console.print(f"{label} …", highlight=False)
        yield


PHASES = {
    "cache.lookup": "looking into the cache",
    "bundle.load": "loading the bundle",
    "trace.dynamo": "tracing",
    "split": "splitting",
    "toolchain": "looking for the C++ compiler",
    "cache.store": "storing",
}
"""What is said of a phase of the startup while it lasts."""


@contextmanager
def starting(console: Console, events: Events) -> Iterator[None]:
    """Show the phase of a start, which piece is compiled, and the seconds so far.

    A terminal has one line that changes; elsewhere each phase and piece is a line.
    """
    began, jobs, done = time.perf_counter(), 0, 0
    status = console.status("preparing") if console.is_terminal else None

    def show(what: str) -> None:
        line = f"{time.perf_counter() - began:5.1f} s  {what}"
        if status:
            status.update(line)
        else:
            console.print(line, highlight=False)

    def enter(phase: str) -> None:
        if phase in PHASES:
            show(PHASES[phase])

    def hear(event: Event) -> None:
        nonlocal jobs, done
        if event.name == "compile.jobs":
            jobs, done = event.facts["jobs"], 0
            show(f"compiling {jobs} pieces, {event.facts['stored']} from the cache")
        elif event.name == "compile.end":
            done += 1
            low, high = event.facts["range"]
            show(f"compiled piece {done} of {jobs}, for {low} to {high} tokens")
        elif event.name == "cache.wait":
            show("waiting for another process that compiles this model")

    events.phase_listeners.append(enter)
    events.listeners.append(hear)
    try:
        with status or nullcontext():
            yield
    finally:
        events.phase_listeners.remove(enter)
        events.listeners.remove(hear)


@contextmanager
def counting(console: Console, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of items done since its last call."""
    if console.is_terminal:
        from rich.progress import Progress

        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(label, total=total)
            yield lambda done: progress.advance(task, done)
    else:
        yield _line_printer(console, label, total)


def _line_printer(console: Console, label: str, total: int) -> Callable[[int], None]:
    done = shown = 0

    def advance(more: int) -> None:
        nonlocal done, shown
        done += more
        if done * LINES // total > shown * LINES // total:
            shown = done
            console.print(f"{label}: {done} of {total}", highlight=False)

    return advance
