"""The options of `piecegraph run`, shared by every command that brings the same model up."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ..engine.decoder_config import parse_decoder_config
from .options import (
    BACKENDS,
    DTYPES,
    MODES,
    STRATEGIES,
    SWITCH_NAMES,
    VERIFY,
    RunOptions,
    choice,
    finite,
    parse_sizes,
    writable_cache,
    writable_directory,
)
from .trace_reader import EXCERPT


def read_run_options(
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
        str | None, typer.Option(help="Padded sizes with graphs: 1,2,4,8 or a sizes file.")
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
    off: Annotated[
        list[str] | None,
        typer.Option(help="Turn a part off: " + ", ".join(SWITCH_NAMES) + ". Repeatable."),
    ] = None,
    dump_dir: Annotated[
        Path | None, typer.Option(help="Where to write graphs and generated code for people.")
    ] = None,
) -> RunOptions:
    """Options as given on the command line, checked. Raises InvalidSetting."""
    return RunOptions(
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
        cache_dir=writable_cache(cache_dir),
        cache=not no_cache,
        block_size=block_size,
        kv_blocks=kv_blocks,
        verify=choice("--verify", verify, VERIFY),
        off=tuple(choice("--off", name, SWITCH_NAMES) for name in off or ()),
        dump_dir=writable_directory("--dump-dir", dump_dir),
    )


def with_run_options(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose first parameter is a RunOptions, as one that has all of their options."""
    own, shared = inspect.signature(command), inspect.signature(read_run_options)
    _, *rest = own.parameters.values()

    def run_with_options(**given: Any) -> int:
        options = read_run_options(**{name: given.pop(name) for name in shared.parameters})
        return command(options, **given)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*rest, *shared.parameters.values())]
    hints = {
        **get_type_hints(read_run_options, include_extras=True),
        **get_type_hints(command, include_extras=True),
    }
    run_with_options.__name__ = command.__name__
    run_with_options.__doc__ = command.__doc__
    run_with_options.__annotations__ = {p.name: hints[p.name] for p in parameters}
    run_with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=hints[p.name]) for p in parameters]
    )
    return run_with_options
