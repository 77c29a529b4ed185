"""`piecegraph bench`: comparisons within the library, serving under load, two results compared."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...dispatch import CaptureStrategy, GraphMode
from ...errors import BenchmarksMissing, InvalidSetting
from ..report import sections
from ..report.output import Output, outputs, read_facts
from ..serve.options import RunOptions, choice
from .run_commands import JsonOption, console_beside, stderr, with_run_options, write_json

if TYPE_CHECKING:
    from ..engine.scheduler import Request

bench_app = typer.Typer(
    help="Benchmarks; they are in a checkout of the repository only.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

COMPARISONS = {
    "dispatch": "What a decision costs.",
    "prepare": "What a cold and a warm start cost.",
    "step": "What the library adds to a step.",
    "strategies": "What capturing early or late costs.",
}

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


@contextmanager
def _benchmarks() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "piecegraph.tools.bench":
            raise
        raise BenchmarksMissing from error


QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")]


def _compare(
    name: str, quick: bool, plot: Path | None, json_path: Path | None, **chosen: Any
) -> int:
    with _benchmarks():
        from ..bench import find, plotter
    to_json, to_plot = outputs(
        {"--json": json_path, "--plot": plot}, stdout=("--json",), plots=("--plot",)
    )
    benchmark = find(name)
    draw = plotter(benchmark, to_plot.path) if to_plot else None
    result = benchmark.run(quick, **chosen)
    _show(sections.benchmark_section(name, result), result, to_json)
    if to_plot and draw:
        with to_plot.writing():
            draw(result)
    return 0


def _comparison(name: str) -> Any:
    def run(
        quick: QuickOption = False, plot: PlotOption = None, json_path: JsonOption = None
    ) -> int:
        return _compare(name, quick, plot, json_path)

    return run


def _starts(
    quick: QuickOption = False,
    ways: Annotated[
        str | None, typer.Option(help="Ways to start, such as cold,warm_ahead; all by default.")
    ] = None,
    plot: PlotOption = None,
    json_path: JsonOption = None,
) -> int:
    with _benchmarks():
        from ..bench.prepare import WAYS
    chosen = [choice("--ways", way, tuple(WAYS)) for way in ways.split(",")] if ways else [*WAYS]
    return _compare("prepare", quick, plot, json_path, ways=chosen)


for _name, _help in COMPARISONS.items():
    bench_app.command(_name, help=f"{_help} Two ways, compared within one run.")(
        _starts if _name == "prepare" else _comparison(_name)
    )


@bench_app.command("engine")
def engine_command(
    engine: Annotated[str, typer.Option(help="vllm or transformers.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 8,
    hidden: Annotated[int, typer.Option(min=128, help="Its width, a multiple of 128.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is started.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="How often requests are served, warm.")] = 15,
    json_path: JsonOption = None,
) -> int:
    """Compare an engine with and without piecegraph: starts, throughput and memory."""
    (to_json,) = outputs({"--json": json_path}, stdout=("--json",))
    with _benchmarks():
        from ..bench.engine import INSTALL, run
    engine = choice("--engine", engine, tuple(INSTALL))
    if hidden % 128:
        raise InvalidSetting(
            name="--hidden",
            value=hidden,
            reason="heads have a width of 64, and two share keys and values",
            expected="a multiple of 128",
        )
    result = run(engine, layers=layers, hidden=hidden, rounds=rounds, runs=runs)
    _show(sections.benchmark_section(engine, result), result, to_json)
    return 0


@bench_app.command("serve")
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
    with _benchmarks():
        from ..bench.load import RAMPS, Arrivals, parse_objectives, synthetic_rows
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
    from ..serve.requests import read_requests, requests_of

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


@bench_app.command("latency")
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
    with _benchmarks():
        from ..bench.load import synthetic_rows
    from ..serve.requests import requests_of

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


@bench_app.command("compare")
def compare_command(
    old: Annotated[Path, typer.Argument(help="Result of `bench serve --json`.")],
    new: Annotated[Path, typer.Argument(help="Another one.")],
    json_path: JsonOption = None,
) -> int:
    """Compare two results: better, worse or no difference, by the spread of their rounds."""
    (to_json,) = outputs({"--json": json_path}, stdout=("--json",))
    with _benchmarks():
        from ..bench.compare import SCHEMA, compare, comparison_section
    command = "piecegraph bench serve --json"
    results = (read_facts(path, "result", command, SCHEMA, "summary") for path in (old, new))
    found = compare(*results)
    _show(comparison_section(found), found, to_json)
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
    to_json, to_plot = outputs(
        {"--json": json_path, "--plot": plot}, stdout=("--json",), plots=("--plot",)
    )
    if to_plot is not None:
        from ..report.output import figure_class

        figure_class()
    from ..bench import serving
    from ..bench.compare import SCHEMA, summary_section, summed_up
    from ..bench.load import summary
    from ..serve.report import origin

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
        **origin(),
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


def _show(section: sections.Section, result: dict[str, Any], to_json: Output | None) -> None:
    console_beside(to_json).print(*sections.as_terminal(section), sep="\n")
    write_json(to_json, result)


def _chosen(flag: str, text: str | None, kinds: Any, default: Any) -> list[Any]:
    return [default] if text is None else [choice(flag, each, kinds) for each in text.split(",")]
