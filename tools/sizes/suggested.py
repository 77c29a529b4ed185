"""Sizes that a prepared model should have had for the steps that it ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import PreparedModel
from ...config import capture_sizes
from ...dispatch import DENSE_END, RuntimeMode
from .traffic import padding_waste, suggest_sizes


def suggested_sizes(prepared: PreparedModel) -> dict[str, Any] | None:
    """The sizes in use, and those that would serve the steps better if there are any, as the report
    of a run states them; None without sizes.

    Suggested sizes end where default sizes may end, or at the last of the user's.
    """
    mode, config = prepared.resolved.mode, prepared.config
    sizes = capture_sizes(mode, config)
    if not sizes:
        return None
    largest = sizes[-1]
    if config.capture_sizes is None and mode.mixed is not RuntimeMode.NONE:
        end = min(DENSE_END, config.max_num_tokens)
        largest = max(largest, end - end % config.sizes.alignment)
    steps = prepared.usage.counts(largest)
    suggested = suggest_sizes(
        sizes,
        steps,
        widest=config.max_num_reqs * max(config.variants.all_query_lens()),
        alignment=config.sizes.alignment,
    )
    return {**_with_waste(sizes, steps), "suggested": suggested and _with_waste(suggested, steps)}


def _with_waste(sizes: tuple[int, ...], steps: Sequence[int]) -> dict[str, Any]:
    waste = padding_waste(steps, sizes)
    return {"sizes": sizes, "padding": waste.share, "steps_above": int(waste.without_graph)}
