"""From settings to a dispatch policy: the graph mode in use, and the plan of graphs to capture."""

from __future__ import annotations

from ..dispatch import (
    DENSE_END,
    DispatchPlan,
    GraphMode,
    ResolvedMode,
    align_sizes,
    decode_tiers,
    default_capture_sizes,
    lora_cases,
    make_plan,
    resolve_mode,
    user_capture_sizes,
)
from .config import Config, LoraGraphs


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
    sizes: tuple[int, ...] = ()
    lengths = query_lens(config)
    if mode is not GraphMode.NONE and config.capture_sizes is not None:
        sizes = user_capture_sizes(config.capture_sizes, max_num_tokens=config.max_num_tokens)
        sizes = align_sizes(sizes, config.size_alignment, limit=config.max_num_tokens)
    elif mode is not GraphMode.NONE:
        sizes = default_capture_sizes(
            config.max_num_reqs,
            config.max_num_tokens,
            query_len=max(lengths),
            tiers=decode_tiers(config.speculation_schedule) if config.speculation_schedule else (),
            ceiling=config.size_ceiling,
            interactive=config.interactive_sizes,
            alignment=config.size_alignment,
        )
    return make_plan(
        mode,
        sizes,
        max_num_reqs=config.max_num_reqs,
        query_lens=lengths,
        varlen_decode=config.traits.varlen_decode,
        lora_cases=lora_cases(
            config.max_loras,
            specialize=config.lora_graphs is not LoraGraphs.ONE,
            specialize_counts=config.lora_graphs is LoraGraphs.BY_COUNT,
        ),
        axes=config.axes,
        padding=config.padding_limit,
        mixed_end=(config.size_ceiling or DENSE_END) if config.capture_sizes is None else None,
    )


def query_lens(config: Config) -> tuple[int, ...]:
    """The query lengths of uniform decode, ascending."""
    drafts = {draft + 1 for draft in config.speculation_schedule}
    return tuple(sorted({*config.query_lens, *drafts} or {config.query_len}))
