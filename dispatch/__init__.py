"""Which runtime mode, which descriptor, which sizes: pure policy, without tensors or devices."""

from .decision import NO_SLOT, Candidate, Decision, Reason
from .descriptor import Batch, BatchDescriptor
from .dispatcher import Dispatcher
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

__all__ = [
    "NO_SLOT",
    "AttentionSupport",
    "Axis",
    "Batch",
    "BatchDescriptor",
    "Candidate",
    "Decision",
    "DecodeTier",
    "DispatchPlan",
    "Dispatcher",
    "GraphMode",
    "Histogram",
    "LevelDefaults",
    "ModeChange",
    "ModelTraits",
    "PaddingLimit",
    "PlanEntry",
    "Reason",
    "ResolvedMode",
    "RuntimeMode",
    "align_sizes",
    "decode_tiers",
    "default_capture_sizes",
    "level_defaults",
    "lora_cases",
    "make_plan",
    "resolve_mode",
    "user_capture_sizes",
]
