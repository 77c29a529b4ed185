"""Graph capture and dispatch for LLM inference.

`prepare(model, config)` traces, splits, compiles and caches a model. It returns a `PreparedModel`,
which runs each batch as one full graph, as piecewise graphs, or without a graph.

    config = piecegraph.Config(inputs={"x": "float32[num_tokens, 8]"}, max_num_tokens=64)
    prepared = piecegraph.prepare(model, config)
    prepared.capture()
    result = prepared(x, batch=piecegraph.Batch(num_tokens=3, num_reqs=3))

Start with `help(piecegraph.Config)`, `help(piecegraph.prepare)` and
`help(piecegraph.PreparedModel)`; docs/api.md lists every public name.

prepare     prepare, compile_ahead, Config, SWITCHES, switched_off
settings    Tracing, Codegen, Sizes, Variants, Attention, Steps, Shadow, Eager, Delayed, Lazy,
            CacheSettings, LayerConfig, GraphPass, Axis, PaddingLimit
serve       PreparedModel, Batch, Decision, forward_context, get_forward_context, break_graph
dispatch    GraphMode, RuntimeMode, AttentionSupport, DispatchPlan
explain     Events, backend_report, CacheForecast, explain_miss, MemoryPlan, errors
observe     StepObserver, LoggedStep
test        ReplayBackend, ReplayOptions: graph capture without a GPU
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from . import errors as errors

__version__ = "0.1.0"

__all__ = [
    "SWITCHES", "Attention", "AttentionSupport", "AuxiliaryTask", "Axis", "Batch",
    "BatchDescriptor", "CacheForecast", "CacheSettings", "Codegen", "Config", "Decision",
    "Delayed", "DispatchPlan", "Dispatcher", "Eager", "Events", "ForwardContext", "GraphMode",
    "GraphPass", "LayerConfig", "Lazy", "LoggedStep", "MemoryPlan", "PaddingLimit",
    "PiecegraphError", "PreparedModel", "Ranks", "Reason", "ReplayBackend", "ReplayOptions",
    "RuntimeMode", "Shadow", "Sizes", "StepObserver", "Steps", "Tracing", "Variants", "__version__",
    "backend_report", "break_graph", "cache_root", "compile_ahead", "errors", "explain_miss",
    "forward_context", "get_forward_context", "prepare", "switched_off",
]  # fmt: skip

if TYPE_CHECKING:
    from .public import *
else:

    def __getattr__(name):
        """A public name, imported on first use, so that `import piecegraph` stays light."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(import_module(".public", __name__), name)
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__all__})
