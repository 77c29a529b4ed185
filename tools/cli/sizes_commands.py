"""`piecegraph sizes`: fit capture sizes to a request trace, and show a plan of buckets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..report.output import outputs
from ..serve.options import RunOptions
from .run_commands import JsonOption, with_run_options

MAX_NUM_TOKENS, MAX_NUM_REQS, MAX_GRAPHS = 2048, 256, 48

sizes_app = typer.Typer(help="Capture sizes fitted to traffic, and buckets.", no_args_is_help=True)


@sizes_app.callback()
def sizes() -> None:
    """Capture sizes fitted to traffic, and buckets."""


@sizes_app.command()
def fit(
    trace: Annotated[Path, typer.Argument(help="Request trace, as `run` takes it.")],
    max_graphs: Annotated[int, typer.Option(min=1, help="Most sizes to fit.")] = MAX_GRAPHS,
    rate: Annotated[float, typer.Option(help="Factor on the arrival rate.")] = 1.0,
    max_num_tokens: Annotated[
        int, typer.Option(min=1, help="Token budget of a step.")
    ] = MAX_NUM_TOKENS,
    max_num_reqs: Annotated[
        int, typer.Option(min=1, help="Requests running at a time.")
    ] = MAX_NUM_REQS,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures as JSON; - for stdout.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write a sizes file for `run --capture-sizes`.")
    ] = None,
) -> None:
    """Fit capture sizes to TRACE and show the padding they waste on its last third."""
    from ..serve.fitted_sizes import fit_trace, render
    from ..serve.trace import read_trace

    to_json, to_output = outputs({"--json": json_path, "--output": output}, stdout=("--json",))
    result = fit_trace(
        read_trace(trace),
        name=trace.stem,
        max_graphs=max_graphs,
        rate=rate,
        max_num_tokens=max_num_tokens,
        max_num_reqs=max_num_reqs,
    )
    if to_json is None or not to_json.is_stdout:
        typer.echo(render(result))
    if to_json:
        to_json.write(json.dumps(result, indent=2) + "\n")
    if to_output:
        to_output.write(json.dumps({"capture_sizes": result["sizes"]}) + "\n")


@sizes_app.command()
@with_run_options
def buckets(options: RunOptions, json_path: JsonOption = None) -> int:
    """Show the buckets that `piecegraph run` with these options pads its steps to.

    By default those of `--buckets exponential`: how many, which steps have none, and the padding on
    the trace. Nothing is compiled or run.
    """
    from ..serve.planned_buckets import plan_facts, render
    from ..serve.requests import read_requests

    (to_json,) = outputs({"--json": json_path}, stdout=("--json",))
    facts = plan_facts(options, read_requests(options))
    if to_json is None or not to_json.is_stdout:
        typer.echo(render(facts))
    if to_json:
        to_json.write(json.dumps(facts, indent=2) + "\n")
    return 0
