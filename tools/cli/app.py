"""The command line. Nothing heavy is imported before a command is known to be well-formed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ...cache.keys.environment import LOG_LEVEL, read
from ...errors import (
    BenchmarksMissing,
    CacheError,
    ConfigError,
    DispatchError,
    InvalidSetting,
    PiecegraphError,
)
from ..report.output import outputs
from .cache_commands import cache_app
from .run_commands import (
    JsonOption,
    bisect_command,
    console_beside,
    explain_command,
    run_command,
    write_json,
)
from .sizes_commands import sizes_app
from .trace_command import trace_command

BAD_VALUE, FAILED, INTERRUPTED = 2, 3, 130
LEVELS = ("debug", "info", "warning", "error")

app = typer.Typer(
    help="Graph capture and dispatch for LLM inference.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, 1 for a wrong result, 2 for a bad value, 3 for other failures."""
    try:
        log_to_stderr()
        status = app(
            (sys.argv[1:] if arguments is None else arguments) or ["--help"], standalone_mode=False
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except PiecegraphError as error:
        bad_value = isinstance(error, ConfigError | CacheError | DispatchError)
        return _fail(str(error), BAD_VALUE if bad_value else FAILED)
    except Exception as error:
        # usage errors of click, which typer vendors from 0.26 on
        if not hasattr(error, "format_message"):
            raise
        return _fail(error.format_message(), BAD_VALUE)
    return status if isinstance(status, int) else 0


def log_to_stderr() -> None:
    """Show the library's log from the level in PIECEGRAPH_LOG_LEVEL on, by default warnings."""
    level = (read(LOG_LEVEL) or "warning").casefold()
    if level not in LEVELS:
        raise InvalidSetting(
            name=LOG_LEVEL,
            value=level,
            reason="there is no such level",
            expected="one of " + ", ".join(LEVELS),
        )
    log = logging.getLogger("piecegraph")
    log.setLevel(level.upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)


app.command("run")(run_command)
app.add_typer(sizes_app, name="sizes")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this image.")] = None,
    json_path: JsonOption = None,
) -> int:
    """Run a benchmark: two ways of doing the same, compared within one run."""
    try:
        from ..bench import find, plotter
    except ModuleNotFoundError as error:
        if error.name != "piecegraph.tools.bench":
            raise
        raise BenchmarksMissing from error
    to_json, to_plot = outputs({"--json": json_path, "--plot": plot}, stdout=("--json",))
    benchmark = find(name)
    draw = plotter(benchmark, to_plot.path) if to_plot else None
    result = benchmark.run(quick)
    from ..report.sections import as_terminal, benchmark_section

    console_beside(to_json).print(*as_terminal(benchmark_section(name, result)), sep="\n")
    write_json(to_json, result)
    if to_plot and draw:
        with to_plot.writing():
            draw(result)
    return 0


app.command("bisect")(bisect_command)
app.command("explain")(explain_command)
app.command("trace")(trace_command)
app.add_typer(cache_app, name="cache")


def _fail(message: str, status: int) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return status
