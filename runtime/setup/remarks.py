"""What is known of settings before the first step: which steps will be slow."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from ...config import Config, attention_support, dispatch_plan, resolve_graph_mode
from ...dispatch import (
    AttentionSupport,
    DispatchPlan,
    ResolvedMode,
    RuntimeMode,
    sizes_for,
    uncovered_decodes,
    unreached_sizes,
)
from ...dispatch.resolve import UNDECLARED, UNSPLIT
from ..core.records import Record


class Remark(Record):
    """What makes a model slower than it need be; `todo` is the remedy."""

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


class StepsMissed(Remark, event="steps.missed", level=logging.WARNING, report="remarks.steps"):
    """Most of the first steps could not use the graphs that there are: `steps` for this reason."""

    steps: int


def remarks(config: Config, resolved: ResolvedMode, plan: DispatchPlan) -> Iterator[Remark]:
    """What makes a model with these settings slower than need be."""
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
