"""`piecegraph run`, `explain` and `bisect`: commands that serve a request trace."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ...errors import InvalidSetting, ToolMissing
from ..explain import FORMATS, compared, rendered
from ..explain.against import SCHEMA
from ..report.output import output_of, outputs, read_facts, reading
from ..serve.options import RunOptions, choice, declared_options, flag_of, read_run_options
from ..serve.ranks import joined_ranks, launched_rank, of_rank, ranks_section

if TYPE_CHECKING:
    from rich.console import Console

    from ... import Events
    from ..bisect import BisectCase
    from ..report.output import Output
    from ..serve.report import Report
    from ..serve.run import Service

WRONG_RESULT = 1

JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the report as JSON; - for stdout.")
]

ReplayOption = Annotated[
    Path | None, typer.Option("--replay", help="Run the steps in this file, of `run --record`.")
]


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def with_run_options(command: Callable[..., int]) -> Callable[..., int]:
    """`command`, whose first parameter is a RunOptions, as a function of the options as typed."""
    _, *rest = inspect.signature(command).parameters.values()
    hints = get_type_hints(command, include_extras=True)
    types = get_type_hints(RunOptions)
    shared = dict(declared_options())
    parameters = []
    for name, declared in shared.items():
        option = typer.Option(
            flag_of(name),
            help=declared.help,
            hidden=declared.panel is not None,
            rich_help_panel=declared.panel,
            **declared.typer,
        )
        default = None if declared.default == () else declared.default
        parameters.append(_keyword(name, default, Annotated[declared.typed(types[name]), option]))
    parameters += [_keyword(p.name, p.default, hints[p.name]) for p in rest]
    parameters.append(_keyword("help_all", False, HelpAllOption))

    def run_with_options(*, help_all: bool, **arguments: Any) -> int:
        typed = {name: arguments.pop(name) for name in shared}
        return command(read_run_options(**typed), **arguments)

    run_with_options.__name__ = command.__name__
    run_with_options.__doc__ = command.__doc__
    run_with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    run_with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run_with_options


def _show_all_options(context: typer.Context, wanted: bool) -> None:
    if wanted:
        command = copy.copy(context.command)
        command.params = [copy.copy(parameter) for parameter in command.params]
        for parameter in command.params:
            vars(parameter)["hidden"] = False
        typer.echo(command.get_help(context))
        raise typer.Exit


HelpAllOption = Annotated[
    bool,
    typer.Option("--help-all", callback=_show_all_options, is_eager=True, help="Show all options."),
]


def _traced(folder: Path | None) -> Path | None:
    """Let torch write its trace to `folder`, before other options are read, which may import it."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCH_TRACE", str(folder.absolute() / "trace"))
    return folder


@with_run_options
def run_command(
    options: RunOptions,
    json_path: JsonOption = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Write metrics for Prometheus; - for stdout.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Record the steps into this file, for `--replay`.")
    ] = None,
    bug_report: Annotated[
        Path | None,
        typer.Option(
            callback=_traced,
            help="Collect report, steps, log, graphs and torch's trace in a directory.",
        ),
    ] = None,
) -> int:
    """Bring a model up through the cache and serve a real request trace with it.

    Processes that torchrun starts are data-parallel ranks: each serves a part of the requests.
    """
    if launched_rank():  # rank 0 reports
        json_path = metrics = record = bug_report = None
    if bug_report is not None:
        if record is not None:
            reason, expected = "--bug-report records the steps, too", "one of the two options"
            raise InvalidSetting(name="--record", value=record, reason=reason, expected=expected)
        _log_to(bug_report)
        record = bug_report / "steps.pt"
        options = replace(options, dump_dir=options.dump_dir or bug_report / "graphs")
    collected = None if bug_report is None else bug_report / "report.json"
    to_json, to_metrics, to_record, to_collected = outputs(
        {"--json": json_path, "--metrics": metrics, "--record": record, "--bug-report": collected},
        stdout=("--json", "--metrics"),
    )
    if to_metrics is not None and find_spec("prometheus_client") is None:
        raise ToolMissing(name="prometheus-client", extra="metrics")
    options = replace(of_rank(options), json=to_json, metrics=to_metrics)
    with served(options, record=to_record, joining=True) as (service, report):
        exposition = ""
        if to_metrics is not None:
            from ..integrations.prometheus import metrics_text

            exposition = metrics_text(service.prepared)
    from ..report.sections import as_terminal
    from ..serve.report import run_sections

    console = console_beside(to_json, to_metrics)
    sections, is_right = run_sections(report), report["verification"]["ok"]
    if (ranks := report["ranks"]) is not None:
        sections = [] if launched_rank() and is_right else [*sections, ranks_section(ranks)]
        is_right = all(rank["verification"]["ok"] for rank in ranks)
    for section in sections:
        console.print(*as_terminal(section), sep="\n")
    if to_metrics is not None:
        to_metrics.write(exposition)
    write_json(to_json, report)
    write_json(to_collected, report)
    is_right = is_right and report["cache"].get("verified") is not False
    is_right = is_right and not (report["shadow"] and report["shadow"]["wrong"])
    return 0 if is_right else WRONG_RESULT


def _log_to(folder: Path) -> None:
    """Write the whole log to `folder`, too."""
    log = logging.getLogger("piecegraph")
    for shown in log.handlers:
        shown.setLevel(log.level)
    log.addHandler(logging.FileHandler(folder / "log.txt"))
    log.setLevel(logging.DEBUG)


@with_run_options
def explain_command(
    options: RunOptions,
    output: Annotated[Path, typer.Option(help="Where to write; - for stdout.")] = Path(
        "explain.html"
    ),
    format: Annotated[str, typer.Option(help="html, json or md.")] = "html",
    replay: ReplayOption = None,
    against: Annotated[
        Path | None, typer.Option(help="Show what differs from this `--format json` output.")
    ] = None,
    of: Annotated[
        Path | None, typer.Option(help="Explain this `--format json` output; run nothing.")
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(help="Only the nodes of one graph: FULL:256."),
    ] = None,
) -> int:
    """Run like `piecegraph run` and explain it: startup, pieces, guards, captures, dispatch."""
    form = choice("--format", format, FORMATS)
    command, files = "piecegraph explain --format json", {"--against": against, "--of": of}
    old, given = (
        read_facts(path, option, command, SCHEMA, "settings") if path else None
        for option, path in files.items()
    )
    if graph is not None:
        print(graph_explained(options, graph, "json" if form == "json" else "md"), end="")
        return 0
    to_output = output_of("--output", output, stdout=True)
    facts = given if given is not None else explained(options, replay)
    names, paths = " and ".join(n for n in files if files[n]), [str(p) for p in files.values() if p]
    with reading(names, " and ".join(paths), f"what `{command}` wrote") if paths else nullcontext():
        text = rendered(facts if old is None else compared(facts, old), form)
    to_output.write(text)
    if not to_output.is_stdout:
        print(f"written: {output}", file=sys.stderr)
    return 0


@with_run_options
def profile_command(
    options: RunOptions,
    output: Annotated[Path, typer.Option(help="The trace, for Perfetto.")] = Path("profile.json"),
) -> int:
    """Run like `piecegraph run` under torch's profiler: time by piece, splitting op and graph."""
    to_output = output_of("--output", output)
    with served(options, profile=to_output):
        pass
    from ..explain.kernel_times import profile_section, time_by_range
    from ..report.sections import as_terminal

    console_beside().print(*as_terminal(profile_section(time_by_range(output))))
    return 0


@with_run_options
def bisect_command(
    options: RunOptions,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the run to compare.")] = 12,
    script: Annotated[
        Path | None, typer.Option(help="Write a Python script that repeats a finding.")
    ] = None,
    replay: ReplayOption = None,
) -> int:
    """Find which part of the library makes a wrong number; status 1 if one does."""
    outputs({"--script": script})
    case = decoder_case(options, steps, replay)
    from ..bisect import bisect

    finding = bisect(case, script=script, say=lambda line: print(line, flush=True))
    print(finding.line() if finding else "every stage is right")
    return WRONG_RESULT if finding else 0


def decoder_case(options: RunOptions, num_steps: int, replay: Path | None) -> BisectCase:
    """The first `num_steps` steps of serving the requests eagerly, or those in a file.

    The KV cache is empty, as at the first step, or has the rows that the file states.
    """
    from ..serve.requests import read_requests

    requests = read_requests(options)
    from ...runtime.core.step_file import restore_state
    from ...runtime.tensors_by_path import tensors_by_path
    from ..bisect import BisectCase
    from ..engine.metadata import recorded
    from ..serve.run import library_config, start_service
    from ..steps import StepRecorder, load_steps, with_metadata

    eager = replace(options, off=("all",), verify="none")
    with start_service(eager, requests, [], stderr()) as service:
        rebuild = service.buffers.refill
        if replay is not None:
            steps = load_steps(replay, metadata=rebuild)[:num_steps]
        else:
            recorder = StepRecorder(service.prepared, None, metadata=recorded)
            for _ in service.engine.serve(requests):
                if len(recorder.steps) == num_steps:
                    break
            steps = with_metadata(recorder.steps, rebuild)
    for layer in service.layers.values():
        layer.keys.zero_()
        layer.values.zero_()
    if replay is not None:
        restore_state(replay, dict(tensors_by_path("layers", service.layers)))
    return BisectCase(
        model=service.model,
        config=library_config(options, service.model),
        steps=steps,
        layers=service.layers,
        capture_metadata=service.buffers.padding,
    )


@contextmanager
def served(
    options: RunOptions,
    events: Events | None = None,
    record: Output | None = None,
    replay: Path | None = None,
    profile: Output | None = None,
    joining: bool = False,
) -> Iterator[tuple[Service, Report]]:
    """Serve the trace, or the steps in `replay`; gives the service, not closed yet, and the report.

    With `joining` this is a rank, if torchrun has started it, and serves its part of the requests.
    Steps are recorded into `record`; a trace of torch's profiler is written to `profile`. Times
    the import of torch, so nothing may import torch earlier. Raises InvalidSetting for a device
    that this machine does not have and for settings that the library rejects.
    """
    from ..serve.requests import read_requests

    requests, console = read_requests(options), stderr()
    began = time.perf_counter()
    with nullcontext() if events is None else events.span("import torch"):
        from ..report.origin import origin
        from ..serve.run import serve, service_report, start_service
    phases = [("import torch", time.perf_counter() - began)]
    with ExitStack() as stack:
        ranks = stack.enter_context(joined_ranks()) if joining else None
        starting = start_service(options, requests, phases, console, events, ranks)
        service = stack.enter_context(starting)
        if ranks is not None:
            requests = requests[ranks.rank :: ranks.size]
        if replay is not None:
            from ..steps import load_steps, replay_step

            for step in load_steps(replay, metadata=service.buffers.refill):
                replay_step(service.prepared, step)
            yield service, {**origin(), **service.prepared.report()}
            return
        with ExitStack() as recording:
            if record is not None:
                from ..engine.metadata import recorded
                from ..steps import StepRecorder

                recorder = StepRecorder(service.prepared, record.path, metadata=recorded)
                recording.enter_context(recorder)
            if profile is not None:
                recording.enter_context(_profiled(service, profile))
            serve(service, requests, console)
        yield service, service_report(service, options, requests, phases)


@contextmanager
def _profiled(service: Service, output: Output) -> Iterator[None]:
    """Under torch's profiler with ranges on; its trace goes to `output`."""
    from torch.profiler import profile

    service.prepared.parts.log.profiler_ranges()
    with profile() as profiler:
        yield
    service.prepared.parts.log.profiler_ranges(on=False)
    with output.writing() as path:
        profiler.export_chrome_trace(str(path))


def explained(options: RunOptions, replay: Path | None = None) -> dict[str, Any]:
    """The facts of a run."""
    from ... import Events

    events = Events(detailed=True)
    with served(options, events, replay=replay) as (service, report):
        from ..explain.collect import collect

        return collect(report, service.prepared, service.engine.log.steps, events)


def graph_explained(options: RunOptions, graph: str, form: str) -> str:
    """The nodes of one graph of a start, which is captured once more under torch's profiler."""
    from ..serve.requests import read_requests
    from ..serve.run import start_service

    with (
        TemporaryDirectory() as folder,
        start_service(options, read_requests(options), [], stderr()) as service,
    ):
        from ..explain.graph_nodes import find_graph, graph_facts, rendered_graph

        prepared = service.prepared
        graph_index = find_graph(prepared, graph)
        prepared.release()
        prepared.capture(profile_dir=folder)
        return rendered_graph(graph_facts(prepared, graph_index, Path(folder)), form)


def console_beside(*outputs: Output | None) -> Console:
    """The console for people: standard error if one of `outputs` takes standard output."""
    from rich.console import Console

    return Console(stderr=any(each is not None and each.is_stdout for each in outputs))


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, quiet=bool(launched_rank()))


def write_json(output: Output | None, facts: Any) -> None:
    if output is not None:
        output.write(json.dumps(facts, indent=2, allow_nan=False) + "\n")


def say(to_json: Output | None, facts: Any, text: str) -> None:
    """Print an answer as a text, and write it as JSON; for `-` print that instead."""
    if to_json is None or not to_json.is_stdout:
        print(text, flush=True)
    write_json(to_json, facts)
