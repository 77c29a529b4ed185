"""From settings to a dispatch policy: the graph mode in use, and the plan of graphs to capture."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import Config
from ...dispatch import (
    DENSE_END,
    AttentionSupport,
    Dispatcher,
    DispatchPlan,
    GraphMode,
    ResolvedMode,
    align_sizes,
    bucket_plan,
    decode_tiers,
    default_capture_sizes,
    lora_cases,
    make_plan,
    resolve_mode,
    user_capture_sizes,
)
from ...dispatch.resolve import UNDECLARED


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
        eager=not config.compile and config.graph_mode is None,
    )


def dispatch_plan(mode: GraphMode, config: Config) -> DispatchPlan:
    """The graphs to capture for `mode`; none for mode NONE."""
    if config.sizes.buckets and mode is not GraphMode.NONE:
        sizes = config.sizes
        return bucket_plan(sizes.buckets, config.max_num_reqs, sizes.bucket_memory)
    variants = config.variants
    return make_plan(
        mode,
        capture_sizes(mode, config),
        max_num_reqs=config.max_num_reqs,
        query_lens=variants.all_query_lens(),
        varlen_decode=config.attention.varlen_decode,
        lora_cases=lora_cases(variants.max_loras, variants.lora_graphs),
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


def attention_support(config: Config) -> dict[str, AttentionSupport]:
    """Attention capability by group. Ops for which nothing is declared support nothing."""
    support = config.attention.support
    if support is None:
        breaks = config.splitting_ops or not config.compile
        return {UNDECLARED: AttentionSupport.NEVER} if breaks else {}
    return {"attention": support} if isinstance(support, AttentionSupport) else dict(support)
