"""Shows progress of long work: a bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.markup import escape

from ...events import Events
from ..start_lines import start_lines

LINES = 10
"""Maximum number of plain lines for one task, after the first line."""


class _Line:
    """A text with the seconds since it was made, which a terminal draws again and again."""

    def __init__(self, text: str) -> None:
        self.text, self._began = text, time.perf_counter()

    def __rich__(self) -> str:
        return escape(f"{time.perf_counter() - self._began:5.1f} s  {self.text}")


@contextmanager
def starting(console: Console, events: Events) -> Iterator[Callable[[str], None]]:
    """Show what a start does, and the seconds so far; yields what shows a line.

    A terminal has one line that changes; elsewhere each is printed.
    """
    line = _Line("preparing")

    def show(text: str) -> None:
        line.text = text
        if not console.is_terminal:
            console.print(line, highlight=False, soft_wrap=True)

    status = console.status(line) if console.is_terminal else nullcontext()
    with status, start_lines(events, show):
        yield show


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
