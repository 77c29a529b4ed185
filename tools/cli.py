"""The command line. Nothing heavy is imported before a command is known to be well-formed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CacheError, ConfigError, DispatchError, InvalidSetting, PiecegraphError
from .bisect.command import bisect_command
from .cache_commands import cache_app
from .explain.command import explain_command
from .log import log_to_stderr
from .options import STDOUT, RunOptions, writable
from .run_arguments import with_run_options
from .sizes_commands import sizes_app
from .trace_command import trace_command

if TYPE_CHECKING:
    from rich.console import Console

WRONG_RESULT, BAD_VALUE, FAILED, INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    help="Graph capture and dispatch for LLM inference.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the report as JSON; - for standard output.")
]


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
        # usage errors of click, of which typer brings its own copy from 0.26 on
        if not hasattr(error, "format_message"):
            raise
        return _fail(error.format_message(), BAD_VALUE)
    return status if isinstance(status, int) else 0


@app.command()
@with_run_options
def run(
    options: RunOptions,
    json_path: JsonOption = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Write metrics in Prometheus' text form; - for stdout.")
    ] = None,
) -> int:
    """Bring a model up through the cache and serve a real request trace with it."""
    return _run(
        replace(options, json=writable("--json", json_path), metrics=writable("--metrics", metrics))
    )


app.add_typer(sizes_app, name="sizes")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this image.")] = None,
    json_path: JsonOption = None,
) -> int:
    """Run a benchmark: two ways of doing the same, compared within one run."""
    from .bench import draw, find, names

    path, plot = writable("--json", json_path), writable("--plot", plot)
    if name not in names():
        raise InvalidSetting(
            name="bench",
            value=name,
            reason="there is no such benchmark",
            expected="one of " + ", ".join(names()),
        )
    result = find(name).run(quick)
    if plot is not None:
        draw(find(name), result, plot)
    from .tables import benchmark_tables

    _console(path).print(*benchmark_tables(name, result), sep="\n")
    _write_json(path, result)
    return 0


app.command("bisect")(bisect_command)
app.command("explain")(explain_command)
app.command("trace")(trace_command)
app.add_typer(cache_app, name="cache")


def _run(options: RunOptions) -> int:
    from .workload import read_requests

    requests = read_requests(options)
    began = time.perf_counter()
    from .render import render
    from .run import bring_up_and_serve

    phases = [("import torch", time.perf_counter() - began)]
    report = bring_up_and_serve(options, requests, phases, _stderr())
    render(report, _console(options.json))
    _write_json(options.json, report)
    return 0 if report["verification"]["ok"] else WRONG_RESULT


def _console(json_path: Path | None) -> Console:
    """Where a report for people goes: not to standard output if JSON goes there."""
    from rich.console import Console

    return _stderr() if json_path == STDOUT else Console()


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _write_json(path: Path | None, report: dict[str, Any]) -> None:
    if path is None:
        return
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        path.write_text(text)


def _fail(message: str, status: int) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return status
