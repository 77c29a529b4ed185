"""The unique pieces of a model as graphs, for tools that inspect one and compile parts of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ..cache import Cache
from ..events import Events
from ..torch_compat.dynamo import reasoning_about_sizes
from .backends.registry import compiler_named
from .guards.trace_with_guards import trace_with_guards
from .ir.compilation import CompileRequest
from .ir.config import CompileConfig
from .lower.split_model import split_model


@dataclass(frozen=True)
class DebugPiece:
    """One unique piece: its graph, and fake inputs to compile it for."""

    digest: str
    graph: GraphModule
    inputs: list[Any]


def debug_pieces(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    examples: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> list[DebugPiece]:
    """Trace and split `model`; the unique pieces in the order in which a plan numbers them.

    Raises the errors of tracing and splitting.
    """
    events = Events()
    request = CompileRequest(model, config, Cache(None, events), events, device, examples)
    split = split_model(trace_with_guards(request), events)
    return [
        DebugPiece(each.digest, each.piece.module(split.trace.graph), each.piece.example_values())
        for each in split.unique
    ]


def compile_graph(
    graph: GraphModule, inputs: list[Any], config: CompileConfig
) -> Callable[[list[Any]], Any]:
    """`graph` compiled as a piece would be; the function takes one list of arguments."""
    compiler = compiler_named(config.compiler)
    with compiler.session(), reasoning_about_sizes(config.dynamic_shapes.value):
        fn, _ = compiler.compile(graph, inputs, config.inductor_options)()
    return fn
