"""Which runtime mode, which descriptor, which sizes: pure policy, without tensors or devices.

What a step needs is imported here; buckets and fitted sizes are loaded when first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .decision import NO_GRAPH, Decision, Reason
from .descriptor import Batch, BatchDescriptor
from .dispatcher import Candidate, Dispatcher
from .lora import lora_cases
from .modes import AttentionSupport, GraphMode, RuntimeMode
from .plan import Axis, DispatchPlan, PaddingLimit, PlanEntry, make_plan
from .resolve import (
    LevelDefaults,
    ModeChange,
    ModelTraits,
    ResolvedMode,
    level_defaults,
    resolve_mode,
)
from .sizing.histogram import Histogram
from .sizing.ladder import (
    DecodeTier,
    align_sizes,
    decode_tiers,
    default_capture_sizes,
    user_capture_sizes,
)

if TYPE_CHECKING:
    from .buckets.coverage import Hole, close_holes, find_holes
    from .buckets.defaults import BucketRanges, BucketStrategy, default_ranges
    from .buckets.file import read_buckets
    from .buckets.limits import Bucket, BucketLimits, Phase
    from .buckets.planning import filter_buckets, plan_buckets, with_drafts
    from .buckets.table import BucketTable
    from .sizing.fit import fit_sizes
    from .sizing.traffic import (
        Refit,
        Validated,
        Waste,
        fit_validated,
        padding_waste,
        refit,
        tail_sizes,
    )

__all__ = [
    "NO_GRAPH",
    "AttentionSupport",
    "Axis",
    "Batch",
    "BatchDescriptor",
    "Bucket",
    "BucketLimits",
    "BucketRanges",
    "BucketStrategy",
    "BucketTable",
    "Candidate",
    "Decision",
    "DecodeTier",
    "DispatchPlan",
    "Dispatcher",
    "GraphMode",
    "Histogram",
    "Hole",
    "LevelDefaults",
    "ModeChange",
    "ModelTraits",
    "PaddingLimit",
    "Phase",
    "PlanEntry",
    "Reason",
    "Refit",
    "ResolvedMode",
    "RuntimeMode",
    "Validated",
    "Waste",
    "align_sizes",
    "close_holes",
    "decode_tiers",
    "default_capture_sizes",
    "default_ranges",
    "filter_buckets",
    "find_holes",
    "fit_sizes",
    "fit_validated",
    "level_defaults",
    "lora_cases",
    "make_plan",
    "padding_waste",
    "plan_buckets",
    "read_buckets",
    "refit",
    "resolve_mode",
    "tail_sizes",
    "user_capture_sizes",
    "with_drafts",
]

_LOADED_WHEN_NAMED = {
    "BucketRanges": "buckets.defaults",
    "BucketStrategy": "buckets.defaults",
    "default_ranges": "buckets.defaults",
    "read_buckets": "buckets.file",
    "Bucket": "buckets.limits",
    "BucketLimits": "buckets.limits",
    "Phase": "buckets.limits",
    "BucketTable": "buckets.table",
    "filter_buckets": "buckets.planning",
    "plan_buckets": "buckets.planning",
    "with_drafts": "buckets.planning",
    "Hole": "buckets.coverage",
    "close_holes": "buckets.coverage",
    "find_holes": "buckets.coverage",
    "fit_sizes": "sizing.fit",
    "Refit": "sizing.traffic",
    "Validated": "sizing.traffic",
    "Waste": "sizing.traffic",
    "fit_validated": "sizing.traffic",
    "padding_waste": "sizing.traffic",
    "refit": "sizing.traffic",
    "tail_sizes": "sizing.traffic",
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_WHEN_NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LOADED_WHEN_NAMED[name]}", __name__), name)
    globals()[name] = value
    return value
