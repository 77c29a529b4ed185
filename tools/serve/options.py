"""Options of `piecegraph run`, declared once; the command line derives its parameters from them."""

# ruff: noqa: RUF009 - `option` returns a dataclass field
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ...dispatch import CaptureStrategy, GraphMode
from ...errors import CacheNotWritable, InvalidSetting
from ..engine.decoder_config import DecoderConfig, parse_decoder_config
from ..report.output import Output, folder_fault
from .requests import EXCERPT

BACKENDS = ("inductor", "eager")
DTYPES = ("float32", "float16", "bfloat16")
VERIFY = ("none", "sample", "all")
SWITCH_NAMES = ("all", "compile", "graphs", "inductor", "cache", "dedupe", "guard-proof")

Choice = TypeVar("Choice", bound=Enum | str)
Parse = Callable[[str, Any], Any]


def choice(name: str, value: str, choices: Iterable[Choice]) -> Choice:
    """The one of `choices` that `value` names, ignoring case and with `-` for `_`."""
    by_name = {each.name if isinstance(each, Enum) else each: each for each in choices}
    wanted = value.replace("-", "_").casefold()
    for candidate, found in by_name.items():
        if candidate.replace("-", "_").casefold() == wanted:
            return found
    raise InvalidSetting(
        name=name,
        value=value,
        reason="there is no such choice",
        expected="one of " + ", ".join(by_name).casefold(),
    )


def one_of(choices: Iterable[Any]) -> Parse:
    """A parser for one of `choices`."""
    return lambda name, value: choice(name, value, choices)


def parse_sizes(name: str, value: str) -> tuple[int, ...]:
    """Capture sizes from `1,2,4`, or from a file that `piecegraph sizes fit` wrote.

    The library checks them against its limits.
    """
    if value.endswith(".json"):
        from .fitted_sizes import read_sizes

        return tuple(read_sizes(Path(value)))
    try:
        return tuple(int(item) for item in value.split(","))
    except ValueError:
        raise InvalidSetting(
            name=name,
            value=value,
            reason="it is not a list of numbers",
            expected="sizes separated by commas, such as 1,2,4,8",
        ) from None


def finite(*, above_zero: bool) -> Parse:
    """A parser for a number that is finite and at least (or above) zero."""

    def parse(name: str, value: float) -> float:
        if math.isfinite(value) and value >= 0 and (value > 0 or not above_zero):
            return value
        raise InvalidSetting(
            name=name,
            value=value,
            reason="it is out of range",
            expected="a finite number above 0" if above_zero else "a finite number, 0 or more",
        )

    return parse


def cache_folder(name: str, path: Path) -> Path:
    """A cache directory that can be written. The library would go on without one."""
    if fault := folder_fault(path):
        raise CacheNotWritable(path=path, reason=fault)
    return path


def writable_folder(name: str, path: Path) -> Path:
    """A folder that can be written, made if it is missing. Raises InvalidSetting."""
    if fault := folder_fault(path):
        raise InvalidSetting(
            name=name, value=str(path), reason=fault, expected="a folder that can be written"
        )
    return path


def option(
    default: Any, help: str, *, typed: Any = None, parse: Parse | None = None, **typer: Any
) -> Any:
    """A field that is a command-line option.

    `default` and `typed` are its value and type as typed by the user, by default the field's type;
    `parse(name, value)` makes the field's value of it, unless it is None. `typer` are arguments of
    `typer.Option`; `flag` among them is the option's name if it is not the field's.
    """
    return field(
        metadata={"default": default, "help": help, "typed": typed, "parse": parse, "typer": typer}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Settings of `piecegraph run`; None leaves a choice to the library."""

    model: DecoderConfig = option(
        "tiny",
        "A preset (tiny, small, 1b, 8b) and sizes: small,layers=2.",
        typed=str,
        parse=lambda _, value: parse_decoder_config(value),
    )
    dtype: str = option("float32", "float32, float16 or bfloat16.", parse=one_of(DTYPES))
    device: str = option("cpu", "cpu or cuda.")
    seed: int = option(0, "Draws weights and prompts.", min=0, max=2**63 - 1)
    trace: Path = option(
        EXCERPT, "Request trace in the Azure form.", show_default="an excerpt of it"
    )
    requests: int = option(64, "Requests of the trace to serve.", min=1)
    length_scale: float = option(
        0.05, "Factor on the trace's lengths.", parse=finite(above_zero=True)
    )
    time_scale: float = option(
        0.0,
        "Factor on the trace's arrival times; 0: all arrive at once.",
        parse=finite(above_zero=False),
    )
    mode: GraphMode | None = option(
        None,
        "Graph mode: " + ", ".join(GraphMode.__members__).lower() + ".",
        typed=str | None,
        parse=one_of(GraphMode),
    )
    strategy: CaptureStrategy = option(
        "eager", "Capture: eager, delayed or lazy.", typed=str, parse=one_of(CaptureStrategy)
    )
    capture_sizes: tuple[int, ...] | None = option(
        None,
        "Padded sizes with graphs: 1,2,4,8 or a sizes file.",
        typed=str | None,
        parse=parse_sizes,
    )
    max_num_tokens: int = option(128, "Token budget of a step.", min=1, max=2**17)
    max_num_reqs: int = option(16, "Requests running at a time.", min=1, max=2**17)
    backend: str = option("inductor", "Compiler: inductor or eager.", parse=one_of(BACKENDS))
    level: int | None = option(None, "Optimization level.", min=0, max=3)
    cache_dir: Path | None = option(None, "Where artifacts are kept.", parse=cache_folder)
    cache: bool = option(
        False, "Neither read nor store.", parse=lambda _, value: not value, flag="--no-cache"
    )
    block_size: int = option(16, "Tokens a KV-cache block.", min=1, max=2**13)
    kv_blocks: int | None = option(
        None, "KV-cache blocks; too few force preemption.", min=1, max=2**22
    )
    verify: str = option("sample", "Compare none, sample or all steps.", parse=one_of(VERIFY))
    off: tuple[str, ...] = option(
        (),
        "Turn a part off: " + ", ".join(SWITCH_NAMES) + ". Repeatable.",
        typed=list[str] | None,
        parse=lambda name, values: tuple(choice(name, value, SWITCH_NAMES) for value in values),
    )
    dump_dir: Path | None = option(
        None, "Where to write graphs and generated code for people.", parse=writable_folder
    )
    json: Output | None = None
    metrics: Output | None = None


@dataclass(frozen=True, slots=True)
class Declared:
    """A field of RunOptions as a command-line option; `parameter` is its name in Python."""

    field: str
    flag: str
    parameter: str
    typed: Any
    default: Any
    parse: Parse | None
    typer: dict[str, Any]


def declared_options() -> list[Declared]:
    """The command-line options in their order."""
    declared = []
    for each in fields(RunOptions):
        if facts := each.metadata:
            typer = {**facts["typer"], "help": facts["help"]}
            flag = typer.pop("flag", "--" + each.name.replace("_", "-"))
            parameter = flag.removeprefix("--").replace("-", "_")
            typed = facts["typed"] or each.type
            declared.append(
                Declared(each.name, flag, parameter, typed, facts["default"], facts["parse"], typer)
            )
    return declared


def read_run_options(**given: Any) -> RunOptions:
    """Options as typed, by parameter name, checked and parsed. Raises InvalidSetting."""
    values = {}
    for each in declared_options():
        value = given.pop(each.parameter, None)
        value = each.default if value is None else value
        if each.parse is not None and value is not None:
            value = each.parse(each.flag, value)
        values[each.field] = value
    assert not given, f"no such options: {', '.join(given)}"
    return RunOptions(**values)
