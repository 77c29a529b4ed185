"""Shows progress of long work: a bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

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
