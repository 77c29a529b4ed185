"""Graph capture and dispatch for LLM inference.

`prepare(model, config)` traces, splits, compiles and caches a model and returns a `PreparedModel`
that dispatches each batch to one full graph, piecewise graphs or none. The public names are below;
they are imported on first use, so that `import piecegraph` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compile.debug import DebugPiece, compile_graph, debug_pieces
    from .dispatch import (
        AttentionSupport,
        Batch,
        BatchDescriptor,
        CaptureStrategy,
        Decision,
        Dispatcher,
        GraphMode,
        Reason,
        RuntimeMode,
    )
    from .errors import PiecegraphError
    from .events import Events
    from .runtime.capture.breaks import break_graph
    from .runtime.compile_ahead import compile_ahead
    from .runtime.config import Config
    from .runtime.explain_miss import Why, why
    from .runtime.open_cache import cache_root
    from .runtime.prepare import prepare
    from .runtime.prepared_model import PreparedModel
    from .runtime.step.forward_context import ForwardContext, forward_context, get_forward_context
    from .runtime.strategy.warmup import AuxiliaryTask
    from .runtime.switches import SWITCHES, switched_off

_HOMES = {
    "AttentionSupport": ".dispatch",
    "AuxiliaryTask": ".runtime.strategy.warmup",
    "Batch": ".dispatch",
    "BatchDescriptor": ".dispatch",
    "CaptureStrategy": ".dispatch",
    "Config": ".runtime.config",
    "Decision": ".dispatch",
    "Dispatcher": ".dispatch",
    "Events": ".events",
    "ForwardContext": ".runtime.step.forward_context",
    "GraphMode": ".dispatch",
    "PiecegraphError": ".errors",
    "DebugPiece": ".compile.debug",
    "PreparedModel": ".runtime.prepared_model",
    "Reason": ".dispatch",
    "RuntimeMode": ".dispatch",
    "SWITCHES": ".runtime.switches",
    "Why": ".runtime.explain_miss",
    "break_graph": ".runtime.capture.breaks",
    "cache_root": ".runtime.open_cache",
    "compile_graph": ".compile.debug",
    "compile_ahead": ".runtime.compile_ahead",
    "forward_context": ".runtime.step.forward_context",
    "get_forward_context": ".runtime.step.forward_context",
    "debug_pieces": ".compile.debug",
    "prepare": ".runtime.prepare",
    "switched_off": ".runtime.switches",
    "why": ".runtime.explain_miss",
}

__all__ = [
    "SWITCHES",
    "AttentionSupport",
    "AuxiliaryTask",
    "Batch",
    "BatchDescriptor",
    "CaptureStrategy",
    "Config",
    "DebugPiece",
    "Decision",
    "Dispatcher",
    "Events",
    "ForwardContext",
    "GraphMode",
    "PiecegraphError",
    "PreparedModel",
    "Reason",
    "RuntimeMode",
    "Why",
    "break_graph",
    "cache_root",
    "compile_ahead",
    "compile_graph",
    "debug_pieces",
    "forward_context",
    "get_forward_context",
    "prepare",
    "switched_off",
    "why",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
