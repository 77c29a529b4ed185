"""`piecegraph run`, `explain` and `bisect`: commands that serve a request trace."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..explain import FORMATS, rendered
from ..report.output import outputs
from ..serve.options import RunOptions, choice
from .arguments import with_run_options

if TYPE_CHECKING:
    from rich.console import Console

    from ... import Events
    from ..report.output import Output
    from ..serve.report import Report
    from ..serve.run import Service

WRONG_RESULT = 1

JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the report as JSON; - for standard output.")
]


@with_run_options
def run_command(
    options: RunOptions,
    json_path: JsonOption = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Write metrics in Prometheus' text form; - for stdout.")
    ] = None,
) -> int:
    """Bring a model up through the cache and serve a real request trace with it."""
    to_json, to_metrics = outputs(
        {"--json": json_path, "--metrics": metrics}, stdout=("--json", "--metrics")
    )
    options = replace(options, json=to_json, metrics=to_metrics)
    with served(options) as (service, report):
        exposition = ""
        if to_metrics is not None:
            from ..integrations.prometheus import metrics_text

            exposition = metrics_text(service.prepared)
    from ..report.sections import as_terminal
    from ..serve.report import run_sections

    console = console_beside(to_json, to_metrics)
    for section in run_sections(report):
        console.print(*as_terminal(section))
    if to_metrics is not None:
        to_metrics.write(exposition)
    write_json(to_json, report)
    return 0 if report["verification"]["ok"] else WRONG_RESULT


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
    to_output, to_timeline = outputs(
        {"--output": output, "--timeline": timeline}, stdout=("--output",)
    )
    assert to_output is not None
    facts, trace = explained(options)
    to_output.write(rendered(facts, form))
    if not to_output.is_stdout:
        print(f"written: {output}", file=sys.stderr)
    if to_timeline is not None:
        to_timeline.write(json.dumps(trace))
        print(f"written: {timeline}, for https://ui.perfetto.dev", file=sys.stderr)
    return 0


@with_run_options
def bisect_command(
    options: RunOptions,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the run to compare.")] = 12,
    script: Annotated[
        Path | None, typer.Option(help="Write a Python script that repeats a finding.")
    ] = None,
) -> int:
    """Find which part of the library makes a wrong number; status 1 if one does."""
    from ..serve.requests import read_requests

    requests = read_requests(options)
    outputs({"--script": script})
    from ..bisect import bisect
    from ..bisect.decoder_case import decoder_case

    case = decoder_case(options, requests, steps, stderr())
    finding = bisect(case, script=script, say=lambda line: print(line, flush=True))
    print(finding.line() if finding else "every stage is right")
    return WRONG_RESULT if finding else 0


@contextmanager
def served(options: RunOptions, events: Events | None = None) -> Iterator[tuple[Service, Report]]:
    """Serve the trace; gives the service, not closed yet, and the report.

    Times the import of torch, so nothing may import torch earlier. Raises InvalidSetting for a
    device that this machine does not have and for settings that the library rejects.
    """
    from ..serve.requests import read_requests

    requests, console = read_requests(options), stderr()
    began = time.perf_counter()
    with nullcontext() if events is None else events.span("import torch"):
        from ..serve.run import serve, service_report, start_service
    phases = [("import torch", time.perf_counter() - began)]
    with start_service(options, requests, phases, console, events) as service:
        serve(service, requests, console)
        yield service, service_report(service, options, requests, phases)


def explained(options: RunOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts of a run, and its timeline."""
    from ... import Events

    events = Events(detailed=True)
    with served(options, events) as (service, report):
        from ..explain.collect import collect
        from ..explain.timeline import chrome_trace

        steps = service.engine.served.steps
        return collect(report, service.prepared, steps, events), chrome_trace(events, steps)


def console_beside(*outputs: Output | None) -> Console:
    """The console for people: standard error if one of `outputs` takes standard output."""
    from rich.console import Console

    return Console(stderr=any(each is not None and each.is_stdout for each in outputs))


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def write_json(output: Output | None, report: dict[str, Any]) -> None:
    if output is not None:
        output.write(json.dumps(report, indent=2, allow_nan=False) + "\n")
