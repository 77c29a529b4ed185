"""The command line. Nothing heavy is imported before a command is known to be well-formed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CacheError, ConfigError, DispatchError, InvalidSetting, PiecegraphError
from .decoder_config import parse_decoder_config
from .options import (
    BACKENDS,
    DTYPES,
    MODES,
    STDOUT,
    STRATEGIES,
    VERIFY,
    RunOptions,
    choice,
    finite,
    parse_sizes,
    writable,
)
from .trace_reader import EXCERPT

if TYPE_CHECKING:
    from rich.console import Console

WRONG_RESULT, BAD_VALUE, FAILED, INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    help="Graph capture and dispatch for LLM inference.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the report as JSON; - for standard output.")
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, 1 for a wrong result, 2 for a bad value, 3 for other failures."""
    try:
        status = app(
            (sys.argv[1:] if arguments is None else arguments) or ["--help"], standalone_mode=False
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except PiecegraphError as error:
        bad_value = isinstance(error, ConfigError | CacheError | DispatchError)
        return _fail(str(error), BAD_VALUE if bad_value else FAILED)
    except Exception as error:
        # usage errors of click, of which typer brings its own copy from 0.26 on
        if not hasattr(error, "format_message"):
            raise
        return _fail(error.format_message(), BAD_VALUE)
    return status if isinstance(status, int) else 0


@app.command()
def run(
    model: Annotated[
        str, typer.Option(help="A preset (tiny, small, 1b, 8b) and sizes: small,layers=2.")
    ] = "tiny",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Draws weights and prompts.")] = 0,
    trace: Annotated[
        Path, typer.Option(help="Request trace in the Azure form.", show_default="an excerpt of it")
    ] = EXCERPT,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the trace to serve.")] = 64,
    length_scale: Annotated[float, typer.Option(help="Factor on the trace's lengths.")] = 0.05,
    time_scale: Annotated[
        float, typer.Option(help="Factor on the trace's arrival times; 0: all arrive at once.")
    ] = 0.0,
    mode: Annotated[
        str | None, typer.Option(help="Graph mode: " + ", ".join(MODES).lower() + ".")
    ] = None,
    strategy: Annotated[str, typer.Option(help="Capture: eager, delayed or lazy.")] = "eager",
    capture_sizes: Annotated[
        str | None, typer.Option(help="Padded sizes with graphs, such as 1,2,4,8.")
    ] = None,
    max_num_tokens: Annotated[
        int, typer.Option(min=1, max=2**17, help="Token budget of a step.")
    ] = 128,
    max_num_reqs: Annotated[
        int, typer.Option(min=1, max=2**17, help="Requests running at a time.")
    ] = 16,
    backend: Annotated[str, typer.Option(help="Compiler: inductor or eager.")] = "inductor",
    level: Annotated[int | None, typer.Option(min=0, max=3, help="Optimisation level.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where artifacts are kept.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither read nor store.")] = False,
    block_size: Annotated[
        int, typer.Option(min=1, max=2**13, help="Tokens a KV-cache block.")
    ] = 16,
    kv_blocks: Annotated[
        int | None,
        typer.Option(min=1, max=2**22, help="KV-cache blocks; too few force preemption."),
    ] = None,
    verify: Annotated[str, typer.Option(help="Compare none, sample or all steps.")] = "sample",
    json_path: JsonOption = None,
) -> int:
    """Bring a model up through the cache and serve a real request trace with it."""
    options = RunOptions(
        model=parse_decoder_config(model),
        dtype=choice("--dtype", dtype, DTYPES),
        device=device,
        seed=seed,
        trace=trace,
        requests=requests,
        length_scale=finite("--length-scale", length_scale, above_zero=True),
        time_scale=finite("--time-scale", time_scale, above_zero=False),
        mode=mode and choice("--mode", mode, MODES),
        strategy=choice("--strategy", strategy, STRATEGIES),
        capture_sizes=parse_sizes("--capture-sizes", capture_sizes),
        max_num_tokens=max_num_tokens,
        max_num_reqs=max_num_reqs,
        backend=choice("--backend", backend, BACKENDS),
        level=level,
        cache_dir=cache_dir,
        cache=not no_cache,
        block_size=block_size,
        kv_blocks=kv_blocks,
        verify=choice("--verify", verify, VERIFY),
        json=writable("--json", json_path),
    )
    return _run(options)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")] = False,
    json_path: JsonOption = None,
) -> int:
    """Run a benchmark: two ways of doing the same, compared within one run."""
    from .bench import find, names

    path = writable("--json", json_path)
    if name not in names():
        raise InvalidSetting(
            name="bench",
            value=name,
            reason="there is no such benchmark",
            expected="one of " + ", ".join(names()),
        )
    result = find(name).run(quick)
    from .tables import benchmark_tables

    _console(path).print(*benchmark_tables(name, result), sep="\n")
    _write_json(path, result)
    return 0


def _run(options: RunOptions) -> int:
    from .workload import read_requests

    requests = read_requests(options)
    began = time.perf_counter()
    from .render import render
    from .run import bring_up_and_serve

    phases = [("import torch", time.perf_counter() - began)]
    report = bring_up_and_serve(options, requests, phases, _stderr())
    render(report, _console(options.json))
    _write_json(options.json, report)
    return 0 if report["verification"]["ok"] else WRONG_RESULT


def _console(json_path: Path | None) -> Console:
    """Where a report for people goes: not to standard output if JSON goes there."""
    from rich.console import Console

    return _stderr() if json_path == STDOUT else Console()


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _write_json(path: Path | None, report: dict[str, Any]) -> None:
    if path is None:
        return
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        path.write_text(text)


def _fail(message: str, status: int) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return status
