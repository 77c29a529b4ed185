"""From settings to a dispatch policy: the graph mode in use, and the plan of graphs to capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..dispatch import (
    DENSE_END,
    AttentionSupport,
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
from ..dispatch.settings import LoraGraphs

UNDECLARED = "attention, for which attention.support is not set"


@dataclass(frozen=True, slots=True)
class Policy:
    """How batches are dispatched: the graph mode, with the reasons for it, and the dispatcher."""

    resolved: ResolvedMode
    dispatcher: Dispatcher


def resolve_graph_mode(config: Config) -> ResolvedMode:
    """The graph mode in use, with the reasons; raises FullModeUnsupported."""
    return resolve_mode(
        config.graph_mode,
        support=attention_support(config),
        pieces=bool(config.splitting_ops) or not config.compile,
        level=config.level,
        query_len=max(config.variants.all_query_lens()),
        varlen_decode=config.attention.varlen_decode,
        pooling=config.attention.pooling,
        encoder_decoder=config.attention.encoder_decoder,
        eager=not config.compile and config.graph_mode is None,
    )


def dispatch_plan(mode: GraphMode, config: Config) -> DispatchPlan:
    """The graphs to capture for `mode`; none for mode NONE."""
    if config.sizes.buckets and mode is not GraphMode.NONE:
        return bucket_plan(config.sizes.buckets, config.max_num_reqs)
    variants = config.variants
    return make_plan(
        mode,
        capture_sizes(mode, config),
        max_num_reqs=config.max_num_reqs,
        query_lens=variants.all_query_lens(),
        varlen_decode=config.attention.varlen_decode,
        lora_cases=lora_cases(
            variants.max_loras,
            specialize=variants.lora_graphs is not LoraGraphs.ONE,
            specialize_counts=variants.lora_graphs is LoraGraphs.BY_COUNT,
        ),
        axes=variants.axes,
        padding=config.sizes.padding_limit,
        mixed_end=DENSE_END if config.capture_sizes is None else None,
    )


def capture_sizes(mode: GraphMode, config: Config) -> tuple[int, ...]:
    """The sizes of `config`, or the default sizes; none for mode NONE and with buckets."""
    alignment, schedule = config.sizes.alignment, config.variants.speculation_schedule
    if config.sizes.buckets or mode is GraphMode.NONE:
        return ()
    if config.capture_sizes is not None:
        sizes = user_capture_sizes(config.capture_sizes, max_num_tokens=config.max_num_tokens)
        return align_sizes(sizes, alignment, limit=config.max_num_tokens)
    return default_capture_sizes(
        config.max_num_reqs,
        config.max_num_tokens,
        query_len=max(config.variants.all_query_lens()),
        tiers=decode_tiers(schedule) if schedule else (),
        alignment=alignment,
    )


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
        largest = max(largest, end - end % config.sizes.alignment)
    steps = counts(largest)
    suggestion = suggest_sizes(
        sizes,
        steps,
        widest=config.max_num_reqs * max(config.variants.all_query_lens()),
        alignment=config.sizes.alignment,
    )
    suggested = suggestion and _with_waste(suggestion.sizes, suggestion.waste)
    return {**_with_waste(sizes, padding_waste(steps, sizes)), "suggested": suggested}


def _with_waste(sizes: tuple[int, ...], waste: Waste) -> dict[str, Any]:
    return {"sizes": sizes, "padding": waste.share, "steps_above": int(waste.without_graph)}


def attention_support(config: Config) -> dict[str, AttentionSupport]:
    """Attention capability by group. Ops for which nothing is declared support nothing."""
    support = config.attention.support
    if support is None:
        breaks = config.splitting_ops or not config.compile
        return {UNDECLARED: AttentionSupport.NEVER} if breaks else {}
    return {"attention": support} if isinstance(support, AttentionSupport) else dict(support)
