"""From settings to a dispatch policy: the graph mode in use, and the plan of graphs to capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..dispatch import (
    DENSE_END,
    Dispatcher,
    DispatchPlan,
    GraphMode,
    ResolvedMode,
    RuntimeMode,
    Waste,
    align_sizes,
    bucket_plan,
    decode_tiers,
    default_capture_sizes,
    lora_cases,
    make_plan,
    padding_waste,
    resolve_mode,
    suggest_sizes,
    user_capture_sizes,
)
from .config import Config, LoraGraphs


@dataclass(frozen=True, slots=True)
class Policy:
    """How batches are dispatched: the graph mode, with the reasons for it, and the dispatcher."""

    resolved: ResolvedMode
    dispatcher: Dispatcher


def resolve_graph_mode(config: Config) -> ResolvedMode:
    """The graph mode in use, with the reasons; raises FullModeUnsupported."""
    return resolve_mode(
        config.graph_mode,
        support=config.supports(),
        pieces=config.cuts() or not config.compile,
        level=config.level,
        query_len=max(query_lens(config)),
        traits=config.traits,
        eager=not config.compile and config.graph_mode is None,
    )


def dispatch_plan(mode: GraphMode, config: Config) -> DispatchPlan:
    """The graphs to capture for `mode`; none for mode NONE."""
    if config.buckets and mode is not GraphMode.NONE:
        return bucket_plan(config.buckets, config.max_num_reqs)
    return make_plan(
        mode,
        capture_sizes(mode, config),
        max_num_reqs=config.max_num_reqs,
        query_lens=query_lens(config),
        varlen_decode=config.traits.varlen_decode,
        lora_cases=lora_cases(
            config.max_loras,
            specialize=config.lora_graphs is not LoraGraphs.ONE,
            specialize_counts=config.lora_graphs is LoraGraphs.BY_COUNT,
        ),
        axes=config.axes,
        padding=config.padding_limit,
        mixed_end=DENSE_END if config.capture_sizes is None else None,
    )


def capture_sizes(mode: GraphMode, config: Config) -> tuple[int, ...]:
    """The sizes of `config`, or the default sizes; none for mode NONE and with buckets."""
    sizes: tuple[int, ...] = ()
    if config.buckets:
        return sizes
    if mode is not GraphMode.NONE and config.capture_sizes is not None:
        sizes = user_capture_sizes(config.capture_sizes, max_num_tokens=config.max_num_tokens)
        sizes = align_sizes(sizes, config.size_alignment, limit=config.max_num_tokens)
    elif mode is not GraphMode.NONE:
        sizes = default_capture_sizes(
            config.max_num_reqs,
            config.max_num_tokens,
            query_len=max(query_lens(config)),
            tiers=decode_tiers(config.speculation_schedule) if config.speculation_schedule else (),
            alignment=config.size_alignment,
        )
    return sizes


def suggested_sizes(
    mode: GraphMode, config: Config, counts: Callable[[int], Sequence[int]]
) -> dict[str, Any] | None:
    """The sizes in use, and those that would serve the steps better if there are any, as the report
    states them; None without sizes.

    `counts` gives the number of steps of 0, 1, … tokens up to a limit. Suggested sizes end where
    default sizes may end, or at the last of the user's.
    """
    sizes = capture_sizes(mode, config)
    if not sizes:
        return None
    largest = sizes[-1]
    if config.capture_sizes is None and mode.mixed is not RuntimeMode.NONE:
        end = min(DENSE_END, config.max_num_tokens)
        largest = max(largest, end - end % config.size_alignment)
    steps = counts(largest)
    suggestion = suggest_sizes(
        sizes,
        steps,
        widest=config.max_num_reqs * max(query_lens(config)),
        alignment=config.size_alignment,
    )
    suggested = suggestion and _with_waste(suggestion.sizes, suggestion.waste)
    return {**_with_waste(sizes, padding_waste(steps, sizes)), "suggested": suggested}


def _with_waste(sizes: tuple[int, ...], waste: Waste) -> dict[str, Any]:
    return {"sizes": sizes, "padding": waste.share, "steps_above": int(waste.without_graph)}


def query_lens(config: Config) -> tuple[int, ...]:
    """The query lengths of uniform decode, ascending."""
    drafts = {draft + 1 for draft in config.speculation_schedule}
    return tuple(sorted({*config.query_lens, *drafts} or {config.query_len}))
