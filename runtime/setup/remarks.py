"""What is known of settings before the first step: which steps will be slow, what does nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

from ...config import (
    Config,
    attention_support,
    capture_sizes,
    compile_config,
    dispatch_plan,
    resolve_graph_mode,
)
from ...dispatch import (
    AttentionSupport,
    DispatchPlan,
    GraphMode,
    ResolvedMode,
    RuntimeMode,
    lora_cases,
    sizes_for,
    uncovered_decodes,
    unreached_sizes,
)
from ...dispatch.resolve import UNDECLARED, UNSPLIT
from ...errors import PiecegraphError
from ...settings import Settings
from ..core.records import Record

CHOICES = (
    "level",
    "graph_mode",
    "capture_sizes",
    "sizes.",
    "variants.lora_graphs",
    "strategy",
    "steps.memory_limit",
    "compiler",
    "codegen.",
    "tracing.guards",
    "tracing.dynamic_shapes",
    "bundle",
    "cache_dir",
)
"""Settings that another setting can turn off. The others state a fact of model or engine, or always
have an effect."""


class Remark(Record):
    """What makes a model slower than it need be, or does nothing; `todo` is the remedy."""

    what: str
    todo: str


class SizesUncovered(
    Remark, event="sizes.uncovered", level=logging.WARNING, report="remarks.uncovered"
):
    """Decodes of `query_len` tokens and these numbers of requests run without a graph; capture
    sizes that would do for them."""

    query_len: int
    num_reqs: str
    sizes: list[int]


class SizesUnreached(
    Remark, event="sizes.unreached", level=logging.WARNING, report="remarks.unreached"
):
    """Sizes of `codegen.sizes` that are compiled and that no step has."""

    sizes: list[int]


class ModeLowered(Remark, event="mode.lowered", level=logging.WARNING, report="remarks.mode"):
    """The graph mode is not the one that was asked for, or lacks what is not declared."""


class NoEffect(Remark, event="setting.no_effect", level=logging.INFO, report="remarks.no_effect"):
    """With another value of `setting` the start would be the same."""

    setting: str


class StepsMissed(Remark, event="steps.missed", level=logging.WARNING, report="remarks.steps"):
    """Most of the first steps could not use the graphs that there are: `steps` for this reason."""

    steps: int


def remarks(config: Config, resolved: ResolvedMode, plan: DispatchPlan) -> Iterator[Remark]:
    """What makes a model with these settings slower than need be, or does nothing."""
    yield from _mode(config, resolved)
    query_lens = config.variants.all_query_lens()
    if plan.entries and not config.sizes.buckets:
        for query_len in query_lens:
            num_reqs = uncovered_decodes(plan, query_len, config.max_num_tokens)
            if num_reqs:
                sizes = sizes_for(plan, query_len, num_reqs)
                what = (
                    f"decodes of {shown(num_reqs)} requests with {query_len} tokens have no graph"
                )
                todo = f"Add {shown(sizes)} to capture_sizes, which are in tokens."
                yield SizesUncovered(what, todo, query_len, shown(num_reqs), sizes)
    if config.compile and (sizes := unreached_sizes(plan, config.codegen.sizes, query_lens)):
        yield SizesUnreached(
            f"codegen.sizes has {shown(sizes)}, and each step of so many tokens is padded to"
            " another size",
            "Compile sizes that are captured, or leave these out.",
            sizes,
        )
    for name, cause in without_effect(config):
        because, rest = (f" beside {cause}", "one of them") if cause else ("", "it")
        yield NoEffect(f"{name} has no effect{because}", f"Leave {rest} out.", name)


def remarks_of(config: Config) -> list[Remark]:
    """What is known of settings without a model."""
    resolved = resolve_graph_mode(config)
    return list(remarks(config, resolved, dispatch_plan(resolved.mode, config)))


def _mode(config: Config, resolved: ResolvedMode) -> Iterator[Remark]:
    support = attention_support(config)
    undeclared = UNDECLARED in support or UNSPLIT in support
    never = AttentionSupport.NEVER in support.values() and not undeclared
    for change in resolved.reasons:
        before, after = change.before, change.after
        if before is None:
            continue
        lost = before.decode is RuntimeMode.FULL is not after.decode
        if resolved.requested or (config.compile and lost and not never):
            todo = "Ask for that mode, or correct what it lacks."
            if undeclared:
                todo = (
                    'Declare what attention can do inside a FULL graph, or "NEVER":'
                    ' attention={"support": "UNIFORM_BATCH"}. See docs/guide.md.'
                )
            what = f"graph mode {before.value} is {after.value}: {change.why}"
            yield ModeLowered(what, todo)


def without_effect(config: Config) -> Iterator[tuple[str, str | None]]:
    """Stated settings of which no other value would change the start, and another stated one
    without which it would."""
    stated = _stated(config)
    start = _start(config, {})
    for name, default in stated.items():
        if not name.startswith(CHOICES) or _matters(config, {}, start, name, default):
            continue
        causes = (
            other
            for other, usual in stated.items()
            if other != name
            and _matters(config, changes := {other: usual}, _start(config, changes), name, default)
        )
        yield name, next(causes, None)


def _stated(settings: Settings, path: str = "") -> dict[str, Any]:
    """Settings that were stated and are not the default, with the default, by dotted name."""
    stated: dict[str, Any] = {}
    defaults = type(settings)()
    for name in sorted(settings.model_fields_set):
        value, default = getattr(settings, name), getattr(defaults, name)
        if isinstance(value, Settings) and type(value) is type(default):
            stated |= _stated(value, f"{path}{name}.")
        elif value != default:
            stated[path + name] = default
    return stated


def _matters(
    config: Config, changes: Mapping[str, Any], start: Any, name: str, default: Any
) -> bool:
    """Whether another value of a setting changes the `start` that there is after `changes`."""
    value = attrgetter(name)(config)
    others: list[Any] = [default]
    if isinstance(value, Enum):
        others += [each for each in type(value) if each is not value]
    elif isinstance(value, int):
        others += [1]
    elif isinstance(value, tuple):
        others += [value[:1]]
    return any(_start(config, {**changes, name: other}) != start for other in others)


def _start(config: Config, changes: Mapping[str, Any]) -> Any:
    """What a start makes of the settings in `CHOICES` after `changes`, or why there is none."""
    try:
        return _choices(config.changed(**changes))
    except PiecegraphError as error:
        return str(error)


def _choices(config: Config) -> tuple[Any, ...]:
    mode, sizes, limit = resolve_graph_mode(config).mode, config.sizes, config.steps.memory_limit
    variants = config.variants
    graphs = (
        capture_sizes(mode, config),
        lora_cases(variants.max_loras, variants.lora_graphs),
        (sizes.buckets and sizes.bucket_limits, sizes.buckets and limit and sizes.bucket_memory),
        (sizes.buckets or sizes.padding_limit, config.strategy, limit),
    )
    return (
        mode,
        mode is not GraphMode.NONE and graphs,
        (compile_config(config), config.bundle) if config.compile else config.codegen.dump_dir,
        config.cache and config.cache_dir,
    )


def shown(numbers: Sequence[int], most: int = 6) -> str:
    """Ascending numbers as text: `2 to 6, 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    more = ["…", texts[-1]] if len(texts) > most else texts[most - 1 :]
    return ", ".join([*texts[: most - 1], *more])
