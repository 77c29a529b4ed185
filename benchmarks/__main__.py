"""`python -m benchmarks`, in a checkout: comparisons within the library, engines under load."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from piecegraph.dispatch import CaptureStrategy, GraphMode
from piecegraph.errors import InvalidSetting
from piecegraph.tools.cli.app import run_app
from piecegraph.tools.cli.run_commands import (
    JsonOption,
    console_beside,
    stderr,
    with_run_options,
    write_json,
)
from piecegraph.tools.engine.scheduler import Request
from piecegraph.tools.report.origin import origin
from piecegraph.tools.report.output import Output, outputs, read_facts
from piecegraph.tools.report.sections import ReportSection, as_terminal
from piecegraph.tools.serve.options import RunOptions, choice
from piecegraph.tools.serve.requests import read_requests, requests_of

from . import (
    dispatch,
    engine,
    partitions,
    prepare,
    scaling,
    serving,
    step,
    step_parts,
    strategies,
)
from .compare import SCHEMA, compare, comparison_section, summary_section, summed_up
from .load import RAMPS, Arrivals, parse_objectives, summary, synthetic_rows
from .ratios import ratios_section

app = typer.Typer(
    help="Benchmarks of piecegraph.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
main = functools.partial(run_app, app)

QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")]
RoundsOption = Annotated[
    int, typer.Option(min=1, help="How often each load is served; a verdict needs 3.")
]
WarmupOption = Annotated[int, typer.Option(min=0, help="Requests served first, not measured.")]
ModesOption = Annotated[
    str | None, typer.Option(help="Graph modes to interleave, such as none,piecewise,full.")
]
StrategiesOption = Annotated[
    str | None, typer.Option(help="Capture strategies to interleave, such as eager,lazy.")
]
GoodputOption = Annotated[
    list[str] | None,
    typer.Option(help="Objective in ms: ttft:200, tpot:50 or e2e:3000. Repeatable."),
]
PlotOption = Annotated[Path | None, typer.Option(help="Draw the result into this image.")]


def _comparison(name: str, benchmark: ModuleType, help: str) -> None:
    """A command that compares two ways within one run."""

    @app.command(name, help=f"{help} Compared within one run.")
    def command(quick: QuickOption = False, json_path: JsonOption = None) -> int:
        (to_json,) = outputs({"--json": json_path}, stdout=("--json",))
        result = benchmark.run(quick)
        _show(ratios_section(name, result), result, to_json)
        return 0


_comparison("dispatch", dispatch, "What a decision costs.")
_comparison("strategies", strategies, "What capturing early or late costs.")
_comparison("partitions", partitions, "Inductor's code split, beside the graph split.")
_comparison("scaling", scaling, "What workers save of a cold start at level 3.")


@app.command("step")
def step_command(
    quick: QuickOption = False,
    parts: Annotated[bool, typer.Option("--parts", help="What each part costs a step.")] = False,
    json_path: JsonOption = None,
) -> int:
    """What the library adds to a step. Compared within one run."""
    (to_json,) = outputs({"--json": json_path}, stdout=("--json",))
    result = step_parts.run(quick) if parts else step.run(quick)
    _show(ratios_section("step", result), result, to_json)
    return 0


@app.command("prepare")
def prepare_command(
    quick: QuickOption = False,
    ways: Annotated[
        str | None, typer.Option(help="Ways to start, such as cold,warm_ahead; all by default.")
    ] = None,
    json_path: JsonOption = None,
) -> int:
    """What a cold and a warm start cost. Compared within one run."""
    all_ways = tuple(prepare.WAYS)
    chosen = [choice("--ways", way, all_ways) for way in ways.split(",")] if ways else all_ways
    to_json, _ = _outputs(json_path, None)
    result = prepare.run(quick, chosen)
    _show(ratios_section("prepare", result), result, to_json)
    return 0


@app.command("engine")
def engine_command(
    engine_name: Annotated[str, typer.Option("--engine", help="vllm or transformers.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 8,
    hidden: Annotated[int, typer.Option(min=128, help="Its width, a multiple of 128.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is started.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="How often requests are served, warm.")] = 15,
    json_path: JsonOption = None,
) -> int:
    """Compare an engine with and without piecegraph: starts, throughput and memory."""
    (to_json,) = outputs({"--json": json_path}, stdout=("--json",))
    engine_name = choice("--engine", engine_name, tuple(engine.INSTALL))
    if hidden % 128:
        raise InvalidSetting(
            name="--hidden",
            value=hidden,
            reason="heads have a width of 64, and two share keys and values",
            expected="a multiple of 128",
        )
    result = engine.run(engine_name, layers=layers, hidden=hidden, rounds=rounds, runs=runs)
    _show(ratios_section(engine_name, result), result, to_json)
    return 0


@app.command("serve")
@with_run_options
def serve_command(
    options: RunOptions,
    rate: Annotated[
        str, typer.Option(help="Requests per second: 8, several as 2,8,32, or inf.")
    ] = "inf",
    burstiness: Annotated[
        float, typer.Option(min=0.01, help="Shape of the gamma distribution; 1 is Poisson.")
    ] = 1.0,
    ramp: Annotated[
        str | None, typer.Option(help="linear or exponential, from --rate to --end-rate.")
    ] = None,
    end_rate: Annotated[float | None, typer.Option(min=0.001, help="Rate at the end.")] = None,
    replay_arrivals: Annotated[
        bool, typer.Option("--replay-arrivals", help="Arrivals of the trace; see --time-scale.")
    ] = False,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests in flight.")] = None,
    input_len: Annotated[
        int | None, typer.Option("--input", min=1, help="Prompt tokens instead of the trace's.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option("--output", min=1, help="Generated tokens, with --input.")
    ] = None,
    spread: Annotated[
        float, typer.Option(min=0, max=1, help="Lengths vary by this share around them.")
    ] = 0.0,
    modes: ModesOption = None,
    strategies: StrategiesOption = None,
    rounds: RoundsOption = 3,
    warmup: WarmupOption = 4,
    goodput: GoodputOption = None,
    url: Annotated[
        str | None, typer.Option(help="Measure the engine at this OpenAI-compatible URL instead.")
    ] = None,
    served_model: Annotated[str, typer.Option(help="Name of the model at --url.")] = "default",
    json_path: JsonOption = None,
    plot: PlotOption = None,
) -> int:
    """Serve requests that arrive over time: throughput, goodput and latencies."""
    if (ramp is None) != (end_rate is None):
        raise InvalidSetting(
            name="--ramp", value=ramp, reason="a ramp has two ends", expected="with --end-rate"
        )
    if (input_len is None) != (output_len is None):
        raise InvalidSetting(
            name="--input", value=input_len, reason="one is missing", expected="with --output"
        )
    kind = None if ramp is None else choice("--ramp", ramp, RAMPS)
    rates = _rates(rate)
    rows = None
    if input_len is not None and output_len is not None:
        rows = synthetic_rows(
            options.requests, input_len, output_len, spread=spread, seed=options.seed
        )
    requests = read_requests(options) if rows is None else requests_of(rows, options)
    arrivals = [Arrivals(each, burstiness, kind, end_rate) for each in rates]
    loads = [each.times(len(requests), options.seed) for each in arrivals]
    if replay_arrivals:
        if rows is not None or not options.time_scale:
            raise InvalidSetting(
                name="--replay-arrivals",
                value=True,
                reason="there are no arrival times",
                expected="lengths of the trace and a --time-scale above 0",
            )
        rates, loads = rates[:1], [[request.arrival for request in requests]]
    about = {
        "requests": len(requests),
        "rounds": rounds,
        "warmup": warmup,
        "burstiness": burstiness,
        "ramp": kind,
        "end_rate": end_rate,
        "concurrency": concurrency,
        "input": input_len,
        "output": output_len,
        "spread": spread,
        "seed": options.seed,
        "url": url,
    }
    labels = [{"rate": "trace" if replay_arrivals else f"{each:g}"} for each in rates]
    return _measure(
        options,
        requests,
        loads,
        labels,
        about,
        modes=modes,
        strategies=strategies,
        objectives=parse_objectives(goodput or ()),
        url=url,
        served_model=served_model,
        json_path=json_path,
        plot=plot,
    )


@app.command("latency")
@with_run_options
def latency_command(
    options: RunOptions,
    batch: Annotated[int, typer.Option(min=1, help="Requests that begin together.")] = 8,
    input_len: Annotated[int, typer.Option("--input", min=1, help="Prompt tokens of each.")] = 32,
    output_len: Annotated[
        int, typer.Option("--output", min=1, help="Generated tokens of each.")
    ] = 32,
    modes: ModesOption = None,
    strategies: StrategiesOption = None,
    rounds: RoundsOption = 5,
    warmup: WarmupOption = 1,
    json_path: JsonOption = None,
) -> int:
    """Serve one batch from start to end: the latency of a request, and of each of its tokens."""
    rows = synthetic_rows(batch, input_len, output_len, spread=0, seed=options.seed)
    options = replace(options, max_num_reqs=max(options.max_num_reqs, batch))
    if options.max_num_tokens < options.max_num_reqs:
        options = replace(options, max_num_tokens=options.max_num_reqs)
    shape = {"batch": batch, "input": input_len, "output": output_len}
    return _measure(
        options,
        requests_of(rows, options),
        [[0.0] * batch],
        [shape],
        {**shape, "requests": batch, "rounds": rounds, "warmup": warmup, "concurrency": None},
        modes=modes,
        strategies=strategies,
        objectives={},
        json_path=json_path,
    )


@app.command("compare")
def compare_command(
    old: Annotated[Path, typer.Argument(help="Result of `serve --json`.")],
    new: Annotated[Path, typer.Argument(help="Another one.")],
    json_path: JsonOption = None,
) -> int:
    """Compare two results: better, worse or no difference, by the spread of their rounds."""
    (to_json,) = outputs({"--json": json_path}, stdout=("--json",))
    command = "python -m benchmarks serve --json"
    results = (read_facts(path, "result", command, SCHEMA, "summary") for path in (old, new))
    comparison = compare(*results)
    _show(comparison_section(comparison), comparison, to_json)
    return 0


def _rates(text: str) -> list[float]:
    try:
        rates = [float(each) for each in text.split(",")]
        if not all(each > 0 for each in rates):
            raise ValueError
    except ValueError:
        raise InvalidSetting(
            name="--rate",
            value=text,
            reason="it is no rate",
            expected="requests per second above 0, separated by commas, or inf",
        ) from None
    return rates


def _measure(
    options: RunOptions,
    requests: list[Request],
    loads: Sequence[Sequence[float]],
    labels: Sequence[dict[str, Any]],
    about: dict[str, Any],
    *,
    modes: str | None,
    strategies: str | None,
    objectives: dict[str, float],
    url: str | None = None,
    served_model: str = "",
    json_path: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Measure, print a table, and write what is asked for."""
    to_json, to_plot = _outputs(json_path, plot)
    timed = [serving.with_arrivals(requests, times) for times in loads]
    rounds, warmup, limit = about["rounds"], about["warmup"], about["concurrency"]
    runs = []
    if url is not None:
        address = serving.check_url(url)
        serving.measure_url(address, served_model, requests[:warmup], concurrency=None)
        for number in range(rounds):
            for label, load in zip(labels, timed, strict=True):
                served = serving.measure_url(address, served_model, load, concurrency=limit)
                name = {"mode": served_model, "strategy": None, **label}
                runs.append({**name, "round": number, **summary(served, objectives)})
    else:
        variants = serving.combinations(
            options,
            _chosen("--modes", modes, GraphMode, options.mode),
            _chosen("--strategies", strategies, CaptureStrategy, options.strategy),
        )
        measured = serving.measure_engine(
            variants,
            timed,
            rounds=rounds,
            concurrency=limit,
            warmup=warmup,
            console=stderr(),
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        for index, which, number, served in measured:
            mode = variants[index].mode
            name = {
                "mode": mode.name if mode is not None else "default",
                "strategy": variants[index].strategy.name,
                **labels[which],
            }
            runs.append({**name, "round": number, **summary(served, objectives)})
    result = {
        "schema": SCHEMA,
        **origin("benchmarks"),
        "load": {**about, "objectives": objectives},
        "runs": runs,
        "summary": summed_up(runs, ["mode", "strategy", *labels[0]]),
    }
    _show(summary_section(result["summary"]), result, to_json)
    if errors := sorted({error for run in runs for error in run["errors"]}):
        print(f"warning: requests failed: {', '.join(errors)}", file=sys.stderr)
    if to_plot is not None:
        with to_plot.writing() as path:
            serving.plot(result, path)
    return 0


def _outputs(json_path: Path | None, plot: Path | None) -> tuple[Output | None, Output | None]:
    """Checked before anything is measured. Raises ToolMissing for a plot without matplotlib."""
    to_json, to_plot = outputs({"--json": json_path, "--plot": plot}, stdout=("--json",))
    if to_plot is not None:
        serving.check_plot(to_plot)
    return to_json, to_plot


def _show(section: ReportSection, result: dict[str, Any], to_json: Output | None) -> None:
    console_beside(to_json).print(*as_terminal(section), sep="\n")
    write_json(to_json, result)


def _chosen(flag: str, text: str | None, kinds: Any, default: Any) -> list[Any]:
    return [default] if text is None else [choice(flag, each, kinds) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
