"""Graph capture and dispatch for LLM inference.

`prepare(model, config)` traces, splits, compiles and caches a model. It returns a `PreparedModel`,
which runs each batch as one full graph, as piecewise graphs, or without a graph.

    config = piecegraph.Config(inputs={"x": "float32[num_tokens, 8]"}, max_num_tokens=64)
    prepared = piecegraph.prepare(model, config)
    prepared.capture()
    result = prepared(x, batch=piecegraph.Batch(num_tokens=3, num_reqs=3))

Start with `help(piecegraph.Config)`, `help(piecegraph.prepare)` and
`help(piecegraph.PreparedModel)`; docs/api.md lists every public name.

prepare     prepare, compile_ahead, Config, LayerConfig, SWITCHES, switched_off
serve       PreparedModel, Batch, Decision, forward_context, get_forward_context, break_graph
dispatch    GraphMode, RuntimeMode, AttentionSupport, DispatchPlan, PaddingLimit, CaptureStrategy
explain     Events, CacheForecast, explain_miss, MemoryPlan, errors
observe     StepObserver, LoggedStep
test        ReplayBackend, ReplayOptions: graph capture without a GPU
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import errors as errors
from .lazy import lazy_names

if TYPE_CHECKING:
    from .dispatch import AttentionSupport as AttentionSupport
    from .dispatch import Axis as Axis
    from .dispatch import Batch as Batch
    from .dispatch import BatchDescriptor as BatchDescriptor
    from .dispatch import CaptureStrategy as CaptureStrategy
    from .dispatch import Decision as Decision
    from .dispatch import Dispatcher as Dispatcher
    from .dispatch import DispatchPlan as DispatchPlan
    from .dispatch import GraphMode as GraphMode
    from .dispatch import ModelTraits as ModelTraits
    from .dispatch import PaddingLimit as PaddingLimit
    from .dispatch import Reason as Reason
    from .dispatch import RuntimeMode as RuntimeMode
    from .errors import PiecegraphError as PiecegraphError
    from .events import Events as Events
    from .runtime.backends.replay import ReplayBackend as ReplayBackend
    from .runtime.backends.replay import ReplayOptions as ReplayOptions
    from .runtime.compile_ahead import compile_ahead as compile_ahead
    from .runtime.config import Config as Config
    from .runtime.explain_miss import CacheForecast as CacheForecast
    from .runtime.explain_miss import explain_miss as explain_miss
    from .runtime.graphs.breaks import break_graph as break_graph
    from .runtime.graphs.ledger import MemoryPlan as MemoryPlan
    from .runtime.graphs.warmup import AuxiliaryTask as AuxiliaryTask
    from .runtime.open_cache import LayerConfig as LayerConfig
    from .runtime.open_cache import cache_root as cache_root
    from .runtime.prepare import prepare as prepare
    from .runtime.prepared_model import PreparedModel as PreparedModel
    from .runtime.ranks import Ranks as Ranks
    from .runtime.steps.forward_context import ForwardContext as ForwardContext
    from .runtime.steps.forward_context import forward_context as forward_context
    from .runtime.steps.forward_context import get_forward_context as get_forward_context
    from .runtime.steps.step_log import LoggedStep as LoggedStep
    from .runtime.steps.step_log import StepObserver as StepObserver
    from .runtime.switches import SWITCHES as SWITCHES
    from .runtime.switches import switched_off as switched_off

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".dispatch": (
            "AttentionSupport", "Axis", "Batch", "BatchDescriptor", "CaptureStrategy", "Decision",
            "DispatchPlan", "Dispatcher", "GraphMode", "ModelTraits", "PaddingLimit", "Reason",
            "RuntimeMode",
        ),
        ".errors": ("PiecegraphError",),
        ".events": ("Events",),
        ".runtime.backends.replay": ("ReplayBackend", "ReplayOptions"),
        ".runtime.graphs.breaks": ("break_graph",),
        ".runtime.compile_ahead": ("compile_ahead",),
        ".runtime.config": ("Config",),
        ".runtime.explain_miss": ("CacheForecast", "explain_miss"),
        ".runtime.graphs.ledger": ("MemoryPlan",),
        ".runtime.open_cache": ("LayerConfig", "cache_root"),
        ".runtime.prepare": ("prepare",),
        ".runtime.prepared_model": ("PreparedModel",),
        ".runtime.steps.forward_context": (
            "ForwardContext", "forward_context", "get_forward_context",
        ),
        ".runtime.steps.step_log": ("LoggedStep", "StepObserver"),
        ".runtime.ranks": ("Ranks",),
        ".runtime.graphs.warmup": ("AuxiliaryTask",),
        ".runtime.switches": ("SWITCHES", "switched_off"),
    },
)  # fmt: skip
__all__ += ["__version__", "errors"]
