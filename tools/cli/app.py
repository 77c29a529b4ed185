"""The command line. Nothing heavy is imported before a command is known to be well-formed."""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from importlib.metadata import version
from typing import Annotated, Any, TextIO, cast

import typer

from ...cache.keys.environment import LOG_LEVEL, observed, read
from ...errors import CacheError, ConfigError, DispatchError, InvalidSetting, PiecegraphError
from ..serve.ranks import launched_rank
from ..start_lines import Interrupted
from .cache_commands import cache_app
from .check_commands import check_app
from .doctor_command import doctor_command
from .run_commands import bisect_command, explain_command, profile_command, run_command
from .sizes_commands import sizes_app

BAD_VALUE, FAILED, CLOSED_PIPE = 2, 3, 141
LEVELS = ("debug", "info", "warning", "error")

app = typer.Typer(
    help="Graph capture and dispatch for LLM inference.", pretty_exceptions_enable=False
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `piecegraph` and return its status."""
    return run_app(app, arguments)


def run_app(app: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its status.

    0: fine; 1: a wrong number, or what a command of `cache` documents; 2: a bad value or an output
    that cannot be written; 3: another failure; 130: interrupted; 143: terminated; 141: the reader
    of standard output is gone. A standard error that cannot be written is ignored.
    """
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with redirect_stderr(cast(TextIO, _BestEffort(sys.stderr or io.StringIO()))):
        if sys.stdout is None:  # its number may be that of any file
            return _fail("standard output cannot be written: it is closed", BAD_VALUE)
        try:
            status = _run(app, given)
            sys.stdout.flush()
            return status
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
                raise
            _discard_stdout()
            if error.errno == errno.EPIPE:
                return CLOSED_PIPE
            return _fail(f"standard output cannot be written: {error.strerror}", BAD_VALUE)


def _run(app: typer.Typer, arguments: Sequence[str]) -> int:
    try:
        log_to_stderr()
        status = _parser(app)(arguments, standalone_mode=False)
    except Interrupted as interrupted:
        print(f"interrupted{interrupted.kept}", file=sys.stderr)
        return 128 + interrupted.number
    except SystemExit as error:
        # how click reports a closed pipe
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    except PiecegraphError as error:
        bad_value = isinstance(error, ConfigError | CacheError | DispatchError)
        return _fail(str(error), BAD_VALUE if bad_value else FAILED)
    except OSError as error:
        if error.filename is None:  # of a stream
            raise
        logging.getLogger("piecegraph").debug("command", exc_info=True)
        return _fail(f"{error.filename}: {error.strerror}", BAD_VALUE)
    except ValueError as error:
        value = observed("TORCH_LOGS")
        if value is None or "/torch/_logging/" not in traceback.extract_tb(error.__traceback__)[
            -1
        ].filename.replace(os.sep, "/"):
            raise
        first = str(error).strip().splitlines()[0]
        refused = InvalidSetting(
            name="TORCH_LOGS", value=value, reason=first, expected="names that torch knows"
        )
        return _fail(str(refused), BAD_VALUE)
    except Exception as error:
        # usage errors of click, which typer vendors from 0.26 on
        if not hasattr(error, "format_message"):
            raise
        message, context = error.format_message(), getattr(error, "ctx", None)
        if message.startswith("No such command") and context is not None:
            message += f" Choose one of {', '.join(context.command.list_commands(context))}."
        return _fail(message, BAD_VALUE)
    return status if isinstance(status, int) else 0


@functools.cache
def _parser(app: typer.Typer) -> Any:
    """The parser of all commands, which takes typer 50 ms to make."""
    return typer.main.get_command(app)


class _BestEffort:
    """A stream whose errors are ignored: a full disk behind the log must not lose the report."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # it may be closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):  # it may be closed
            self._stream.flush()


def _discard_stdout() -> None:
    """Discard buffered output, so that Python does not fail to flush it at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"piecegraph {version('piecegraph')}")
        raise typer.Exit


@app.callback(context_settings={"help_option_names": ["-h", "--help"]})
def options_of_all(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Graph capture and dispatch for LLM inference."""


def log_to_stderr() -> None:
    """Show the library's log from the level in PIECEGRAPH_LOG_LEVEL on, by default warnings."""
    level = (read(LOG_LEVEL) or "warning").casefold()
    if level not in LEVELS:
        reason = "there is no such level"
        expected = "one of " + ", ".join(LEVELS)
        raise InvalidSetting(name=LOG_LEVEL, value=level, reason=reason, expected=expected)
    log = logging.getLogger("piecegraph")
    log.setLevel(level.upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)


app.command("run")(run_command)
app.add_typer(sizes_app, name="sizes")


app.command("doctor")(doctor_command)
app.command("bisect")(bisect_command)
app.command("explain")(explain_command)
app.command("profile")(profile_command)
app.add_typer(cache_app, name="cache")
app.add_typer(check_app, name="check")


def _fail(message: str, status: int) -> int:
    rank = launched_rank()
    where = "" if rank is None else f" on rank {rank}"
    print(f"error{where}:", " ".join(message.split()), file=sys.stderr)
    return status
