"""The command line. Nothing heavy is imported before a command is known to be well-formed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import CacheError, ConfigError, DispatchError, PiecegraphError
from ..serve.main_job import main_job
from ..serve.options import STDOUT, RunOptions, different_files, writable, write, writing
from ..serve.run_arguments import with_run_options
from .bisect_command import bisect_command
from .cache_commands import cache_app
from .explain_command import explain_command
from .log import log_to_stderr
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
    different_files({"--json": json_path, "--metrics": metrics})
    return _run(
        replace(
            options,
            json=writable("--json", json_path, or_stdout=True),
            metrics=writable("--metrics", metrics, or_stdout=True),
        )
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
    from ..bench import find, plotter

    path, plot = writable("--json", json_path, or_stdout=True), writable("--plot", plot)
    different_files({"--json": path, "--plot": plot})
    benchmark = find(name)
    draw = plotter(benchmark, plot) if plot else None
    result = benchmark.run(quick)
    from ..report.tables import benchmark_tables

    _console(path).print(*benchmark_tables(name, result), sep="\n")
    _write_json(path, result)
    if plot and draw:
        with writing(plot):
            draw(result)
    return 0


app.command("bisect")(bisect_command)
app.command("explain")(explain_command)
app.command("trace")(trace_command)
app.add_typer(cache_app, name="cache")


def _run(options: RunOptions) -> int:
    with main_job(options, _stderr()) as (service, report):
        metrics = None
        if options.metrics is not None:
            from ..report.metrics import metrics_text

            metrics = metrics_text(service.prepared)
    from ..serve.render import render

    render(report, _console(options.json, options.metrics))
    if options.metrics is not None and metrics is not None:
        write(options.metrics, metrics)
    _write_json(options.json, report)
    return 0 if report["verification"]["ok"] else WRONG_RESULT


def _console(*outputs: Path | None) -> Console:
    """Where a report for people goes: not to standard output if one of `outputs` does."""
    from rich.console import Console

    return _stderr() if STDOUT in outputs else Console()


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _write_json(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        write(path, json.dumps(report, indent=2, allow_nan=False) + "\n")


def _fail(message: str, status: int) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return status
