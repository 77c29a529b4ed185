"""Graph capture and dispatch for LLM inference.

`prepare(model, config)` traces, splits, compiles and caches a model and returns a `PreparedModel`
that dispatches each batch to one full graph, piecewise graphs or none. The public names are below;
they are imported on first use, so that `import piecegraph` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compile.piece_graphs import PieceGraph, compile_graph, piece_graphs
    from .dispatch import (
        AttentionSupport,
        Batch,
        BatchDescriptor,
        Decision,
        Dispatcher,
        GraphMode,
        Reason,
        RuntimeMode,
    )
    from .errors import PiecegraphError
    from .events import Events
    from .runtime.ahead import compile_ahead
    from .runtime.config import CaptureStrategy, Config
    from .runtime.forward_context import ForwardContext, forward_context, get_forward_context
    from .runtime.open_cache import cache_root
    from .runtime.prepare import prepare
    from .runtime.prepared_model import PreparedModel
    from .runtime.recorder import break_graph
    from .runtime.switches import SWITCHES, switched_off
    from .runtime.warmup import AuxiliaryTask
    from .runtime.why import Why, why

_HOMES = {
    "AttentionSupport": ".dispatch",
    "AuxiliaryTask": ".runtime.warmup",
    "Batch": ".dispatch",
    "BatchDescriptor": ".dispatch",
    "CaptureStrategy": ".runtime.config",
    "Config": ".runtime.config",
    "Decision": ".dispatch",
    "Dispatcher": ".dispatch",
    "Events": ".events",
    "ForwardContext": ".runtime.forward_context",
    "GraphMode": ".dispatch",
    "PiecegraphError": ".errors",
    "PieceGraph": ".compile.piece_graphs",
    "PreparedModel": ".runtime.prepared_model",
    "Reason": ".dispatch",
    "RuntimeMode": ".dispatch",
    "SWITCHES": ".runtime.switches",
    "Why": ".runtime.why",
    "break_graph": ".runtime.recorder",
    "cache_root": ".runtime.open_cache",
    "compile_graph": ".compile.piece_graphs",
    "compile_ahead": ".runtime.ahead",
    "forward_context": ".runtime.forward_context",
    "get_forward_context": ".runtime.forward_context",
    "piece_graphs": ".compile.piece_graphs",
    "prepare": ".runtime.prepare",
    "switched_off": ".runtime.switches",
    "why": ".runtime.why",
}

__all__ = [
    "SWITCHES",
    "AttentionSupport",
    "AuxiliaryTask",
    "Batch",
    "BatchDescriptor",
    "CaptureStrategy",
    "Config",
    "Decision",
    "Dispatcher",
    "Events",
    "ForwardContext",
    "GraphMode",
    "PieceGraph",
    "PiecegraphError",
    "PreparedModel",
    "Reason",
    "RuntimeMode",
    "Why",
    "break_graph",
    "cache_root",
    "compile_ahead",
    "compile_graph",
    "forward_context",
    "get_forward_context",
    "piece_graphs",
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
