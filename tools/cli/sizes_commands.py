"""`piecegraph sizes`: fit capture sizes to a request trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..serve.options import STDOUT, different_files, writable, write, writing

sizes_app = typer.Typer(
    help="Capture sizes fitted to traffic.", no_args_is_help=True, rich_markup_mode=None
)


@sizes_app.callback()
def sizes() -> None:
    """Capture sizes fitted to traffic."""


@sizes_app.command()
def fit(
    trace: Annotated[Path, typer.Argument(help="Request trace, as `run` takes it.")],
    max_graphs: Annotated[int, typer.Option(min=1, help="Most sizes to fit.")] = 24,
    rate: Annotated[float, typer.Option(help="Factor on the arrival rate.")] = 1.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures as JSON; - for stdout.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write waste against graphs as PNG (extra `tools`).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write a sizes file for `run --capture-sizes`.")
    ] = None,
) -> None:
    """Fit capture sizes to TRACE and show the padding they waste on its second half."""
    from ..serve.fitted_sizes import draw, fit_trace, render
    from ..serve.trace_reader import read_trace

    writable("--json", json_path, or_stdout=True)
    writable("--plot", plot)
    writable("--output", output)
    different_files({"--json": json_path, "--plot": plot, "--output": output})
    result = fit_trace(read_trace(trace), max_graphs=max_graphs, rate=rate)
    if json_path != STDOUT:
        typer.echo(render(result))
    if json_path:
        write(json_path, json.dumps(result, indent=2) + "\n")
    if output:
        write(output, json.dumps({"capture_sizes": result["sizes"]}) + "\n")
    if plot:
        with writing(plot):
            draw(result, plot)
