"""`piecegraph explain`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import STDOUT, RunOptions, choice, writable
from ..run_arguments import with_run_options

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
    writable("--output", output)
    writable("--timeline", timeline)
    facts, trace = _explained(options)
    text = _written(facts, form)
    if output == STDOUT:
        sys.stdout.write(text)
    else:
        output.write_text(text)
        print(f"written: {output}", file=sys.stderr)
    if timeline is not None:
        timeline.write_text(json.dumps(trace))
        print(f"written: {timeline}, for https://ui.perfetto.dev", file=sys.stderr)
    return 0


def _explained(options: RunOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts of a run, and its timeline."""
    from rich.console import Console

    from ..workload import read_requests

    requests = read_requests(options)
    began = time.perf_counter()
    from ... import Events
    from ..run import bring_up, serve, service_report
    from ..timeline import chrome_trace
    from .collect import collect

    phases = [("import torch", time.perf_counter() - began)]
    console = Console(stderr=True)
    events = Events(detailed=True)
    with bring_up(options, requests, phases, console, events) as service:
        serve(service, requests, console)
        report = service_report(service, options, requests, phases)
        steps = service.engine.served.steps
        return collect(report, service.prepared, steps), chrome_trace(events, steps)


def _written(facts: dict[str, Any], form: str) -> str:
    if form == "json":
        return json.dumps(facts, indent=2, default=str) + "\n"
    if form == "md":
        from .markdown import markdown

        return markdown(facts)
    from .page import page

    return page(facts)
