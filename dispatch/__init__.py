"""Which runtime mode, which descriptor, which sizes: pure policy, without tensors or devices.

What a step needs is imported here; buckets and fitted sizes are loaded when first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .decision import NO_SLOT, Decision, Reason
from .descriptor import Batch, BatchDescriptor
from .dispatcher import Candidate, Dispatcher
from .histogram import Histogram
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
from .sizes import (
    DecodeTier,
    align_sizes,
    decode_tiers,
    default_capture_sizes,
    user_capture_sizes,
)

if TYPE_CHECKING:
    from .bucket_defaults import BucketRanges, BucketStrategy, default_ranges
    from .bucket_file import read_buckets
    from .bucket_limits import Bucket, BucketLimits, Phase
    from .bucket_table import BucketTable
    from .buckets import filter_buckets, plan_buckets, with_drafts
    from .coverage import Hole, close_holes, find_holes
    from .fit import fit_sizes
    from .traffic import (
        Refit,
        Validated,
        Waste,
        fit_validated,
        padding_waste,
        refit,
        tail_sizes,
    )

__all__ = [
    "NO_SLOT",
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
    "BucketRanges": "bucket_defaults",
    "BucketStrategy": "bucket_defaults",
    "default_ranges": "bucket_defaults",
    "read_buckets": "bucket_file",
    "Bucket": "bucket_limits",
    "BucketLimits": "bucket_limits",
    "Phase": "bucket_limits",
    "BucketTable": "bucket_table",
    "filter_buckets": "buckets",
    "plan_buckets": "buckets",
    "with_drafts": "buckets",
    "Hole": "coverage",
    "close_holes": "coverage",
    "find_holes": "coverage",
    "fit_sizes": "fit",
    "Refit": "traffic",
    "Validated": "traffic",
    "Waste": "traffic",
    "fit_validated": "traffic",
    "padding_waste": "traffic",
    "refit": "traffic",
    "tail_sizes": "traffic",
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_WHEN_NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LOADED_WHEN_NAMED[name]}", __name__), name)
    globals()[name] = value
    return value
