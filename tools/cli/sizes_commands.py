"""`piecegraph sizes`: fit capture sizes to a request trace, and show a plan of buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..report.output import outputs
from ..serve.options import RunOptions
from .run_commands import JsonOption, say, with_run_options, write_json

MAX_NUM_TOKENS, MAX_NUM_REQS, MAX_GRAPHS = 2048, 256, 48

sizes_app = typer.Typer(help="Capture sizes fitted to traffic, and buckets.", no_args_is_help=True)


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
    json_path: JsonOption = None,
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
    say(to_json, result, render(result))
    write_json(to_output, {"capture_sizes": result["sizes"]})


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
    say(to_json, facts, render(facts))
    return 0
