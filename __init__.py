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
settings    Tracing, Codegen, Sizes, Variants, Attention, Steps, Eager, Delayed, Lazy,
            CacheSettings, LayerConfig, GraphPass, Axis, PaddingLimit
serve       PreparedModel, Batch, Decision, forward_context, get_forward_context, break_graph
dispatch    GraphMode, RuntimeMode, AttentionSupport, DispatchPlan
explain     Events, CacheForecast, explain_miss, MemoryPlan, errors
observe     StepObserver, LoggedStep
test        ReplayBackend, ReplayOptions: graph capture without a GPU
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import errors as errors
from .lazy import lazy_names

if TYPE_CHECKING:
    from .cache.settings import CacheSettings as CacheSettings
    from .cache.settings import LayerConfig as LayerConfig
    from .compile.ir.config import Codegen as Codegen
    from .compile.ir.config import GraphPass as GraphPass
    from .compile.ir.config import Tracing as Tracing
    from .config import Config as Config
    from .config import Delayed as Delayed
    from .config import Eager as Eager
    from .config import Lazy as Lazy
    from .config import Steps as Steps
    from .dispatch import AttentionSupport as AttentionSupport
    from .dispatch import Axis as Axis
    from .dispatch import Batch as Batch
    from .dispatch import BatchDescriptor as BatchDescriptor
    from .dispatch import Decision as Decision
    from .dispatch import Dispatcher as Dispatcher
    from .dispatch import DispatchPlan as DispatchPlan
    from .dispatch import GraphMode as GraphMode
    from .dispatch import PaddingLimit as PaddingLimit
    from .dispatch import Reason as Reason
    from .dispatch import RuntimeMode as RuntimeMode
    from .dispatch.settings import Attention as Attention
    from .dispatch.settings import Sizes as Sizes
    from .dispatch.settings import Variants as Variants
    from .errors import PiecegraphError as PiecegraphError
    from .events import Events as Events
    from .runtime.backends.replay import ReplayBackend as ReplayBackend
    from .runtime.backends.replay import ReplayOptions as ReplayOptions
    from .runtime.compile_ahead import compile_ahead as compile_ahead
    from .runtime.explain_miss import CacheForecast as CacheForecast
    from .runtime.explain_miss import explain_miss as explain_miss
    from .runtime.graphs.breaks import break_graph as break_graph
    from .runtime.graphs.ledger import MemoryPlan as MemoryPlan
    from .runtime.graphs.warmup import AuxiliaryTask as AuxiliaryTask
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
        ".cache.settings": ("CacheSettings", "LayerConfig"),
        ".compile.ir.config": ("Codegen", "GraphPass", "Tracing"),
        ".config": ("Config", "Delayed", "Eager", "Lazy", "Steps"),
        ".dispatch": (
            "AttentionSupport", "Axis", "Batch", "BatchDescriptor", "Decision", "DispatchPlan",
            "Dispatcher", "GraphMode", "PaddingLimit", "Reason", "RuntimeMode",
        ),
        ".dispatch.settings": ("Attention", "Sizes", "Variants"),
        ".errors": ("PiecegraphError",),
        ".events": ("Events",),
        ".runtime.backends.replay": ("ReplayBackend", "ReplayOptions"),
        ".runtime.graphs.breaks": ("break_graph",),
        ".runtime.compile_ahead": ("compile_ahead",),
        ".runtime.explain_miss": ("CacheForecast", "explain_miss"),
        ".runtime.graphs.ledger": ("MemoryPlan",),
        ".runtime.open_cache": ("cache_root",),
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
