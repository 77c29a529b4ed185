"""`piecegraph explain`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..serve.main_job import main_job
from ..serve.options import STDOUT, RunOptions, choice, different_files, writable, write
from ..serve.run_arguments import with_run_options

FORMATS = ("html", "json", "md")


@with_run_options
def explain_command(
    options: RunOptions,
    output: Annotated[Path, typer.Option(help="Where to write; - for stdout.")] = Path(
        "explain.html"
    ),
    format: Annotated[str, typer.Option(help="html, json or md.")] = "html",
    timeline: Annotated[
        Path | None, typer.Option(help="Write a timeline for Perfetto (Chrome trace format).")
    ] = None,
) -> int:
    """Run like `piecegraph run` and explain it: startup, pieces, guards, captures, dispatch."""
    form = choice("--format", format, FORMATS)
    writable("--output", output, or_stdout=True)
    writable("--timeline", timeline)
    different_files({"--output": output, "--timeline": timeline})
    facts, trace = _explained(options)
    write(output, _written(facts, form))
    if output != STDOUT:
        print(f"written: {output}", file=sys.stderr)
    if timeline is not None:
        write(timeline, json.dumps(trace))
        print(f"written: {timeline}, for https://ui.perfetto.dev", file=sys.stderr)
    return 0


def _explained(options: RunOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts of a run, and its timeline."""
    from rich.console import Console

    from ... import Events

    events = Events(detailed=True)
    with main_job(options, Console(stderr=True), events) as (service, report):
        from ..explain.collect import collect
        from ..report.timeline import chrome_trace

        steps = service.engine.served.steps
        return collect(report, service.prepared, steps), chrome_trace(events, steps)


def _written(facts: dict[str, Any], form: str) -> str:
    if form == "json":
        return json.dumps(facts, indent=2, default=str) + "\n"
    if form == "md":
        from ..explain.markdown import markdown

        return markdown(facts)
    from ..explain.page import page

    return page(facts)
