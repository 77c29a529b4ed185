"""`python -m piecegraph` and the `piecegraph` command."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

CLI_EXTRA = ("typer", "click", "rich", "jinja2", "numpy")
"""What only the command line imports; the library is installed without it."""
ENDING = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Run the command line and return its status; see `tools.cli.app.main`.

    It is 2 without the extra `cli` and 3, below a traceback, after an error that is a bug. After
    Ctrl-C and SIGTERM the process ends at once, and the compilers that it started with it.
    """
    try:
        from .tools.cli.app import main as run_command
        from .tools.start_lines import Interrupted

        def interrupt(number: int, _: object) -> NoReturn:
            _end_children()  # now: code that waits for one would end it, and not what it started
            raise Interrupted(number)

        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        if (status := run_command()) - 128 in ENDING:
            _end_children()
            os._exit(status)  # Python would wait for threads, which wait for compilers
        return status
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in CLI_EXTRA:
            traceback.print_exc()
            return 3
        print(
            f"error: {missing} is not installed."
            " Install the command line with `pip install 'piecegraph[cli]'`.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 3


def _end_children() -> None:
    for child in _descendants("self"):
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


def _descendants(process: str) -> list[str]:
    """The processes that a process has started, and those that these have; on Linux."""
    found: list[str] = []
    with suppress(OSError):
        for path in Path("/proc", process, "task").glob("*/children"):
            for child in path.read_text().split():
                found += [child, *_descendants(child)]
    return found


if __name__ == "__main__":
    sys.exit(main())
