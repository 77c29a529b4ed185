"""`piecegraph sizes`: fit capture sizes to a request trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..report.output import outputs

MAX_NUM_TOKENS, MAX_NUM_REQS, MAX_GRAPHS = 2048, 256, 48

sizes_app = typer.Typer(help="Capture sizes fitted to traffic.", no_args_is_help=True)


@sizes_app.callback()
def sizes() -> None:
    """Capture sizes fitted to traffic."""


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
