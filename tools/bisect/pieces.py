"""The unique pieces of a model as graphs, for tools that inspect one and compile parts of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from ...cache import Cache
from ...compile.backends.registry import compiler_named
from ...compile.guards.numerics_check import concrete_inputs, numeric_difference
from ...compile.guards.trace_with_guards import trace_with_guards
from ...compile.ir.compilation import CompileRequest, PieceFn
from ...compile.ir.config import TOKENS, CompileConfig, GraphPass
from ...compile.passes.graph_pass import inductor_passes, passes_up_to
from ...compile.pieces.compile_ranges import CompileRange, compile_ranges
from ...compile.plan.split_model import split_model
from ...events import Events
from ...torch_compat.tracing.dynamo import reasoning_about_sizes


@dataclass(frozen=True)
class DebugPiece:
    """One unique piece: its graph, fake inputs to compile it for, its symbols with their names."""

    digest: str
    graph: GraphModule
    inputs: list[Any]
    symbols: dict[sympy.Symbol, str]

    def sizes(self, config: CompileConfig, num_tokens: int) -> dict[sympy.Symbol, int]:
        """A value of each symbol: `num_tokens`, or the nearest that the symbol can have."""
        limits = {symbol: config.limits(label) for symbol, label in self.symbols.items()}
        return {symbol: min(max(num_tokens, low), high) for symbol, (low, high) in limits.items()}

    def difference(self, fn: PieceFn, sizes: dict[sympy.Symbol, int]) -> str | None:
        """How `fn` differs from the graph on generated inputs of `sizes`; None if it does not."""
        return numeric_difference(fn, self.graph, sizes)

    def generated_inputs(self, sizes: dict[sympy.Symbol, int]) -> list[Any]:
        """Generated inputs of `sizes`."""
        return concrete_inputs(self.graph, sizes)


def debug_pieces(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    examples: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> list[list[DebugPiece]]:
    """Trace and split `model`; of each trace the unique pieces in the order of its plan.

    Raises the errors of tracing and splitting.
    """
    events = Events()
    request = CompileRequest(model, config, Cache(None, events), events, device, examples)
    return [
        [
            DebugPiece(
                each.digest,
                each.piece.module(split.trace.graph),
                each.piece.example_values(),
                {symbol: str(split.guards.label(symbol)) for symbol in each.piece.symbols()},
            )
            for each in split.unique
        ]
        for split in split_model(trace_with_guards(request), events)
    ]


def range_of(config: CompileConfig, num_tokens: int) -> CompileRange:
    """The range whose code serves `num_tokens`."""
    ranges = compile_ranges(config)
    return next((each for each in ranges if each.low <= num_tokens <= each.high), ranges[-1])


def passes_of(piece: DebugPiece, config: CompileConfig, num_tokens: int) -> tuple[GraphPass, ...]:
    """The passes that run on the piece in the range that serves `num_tokens`, in order."""
    end = range_of(config, num_tokens).high if piece.symbols else None
    return passes_up_to(config.passes, end)


def compile_graph(
    graph: GraphModule,
    inputs: list[Any],
    config: CompileConfig,
    *,
    passes: Sequence[GraphPass] = (),
    sizes: dict[sympy.Symbol, int] | None = None,
) -> Callable[[list[Any]], Any]:
    """`graph` compiled with `passes` as a piece is; the function takes one list of arguments.

    With `sizes` the code is for these sizes alone, as that of a compile size.
    """
    compiler = compiler_named(config.code.compiler)
    if sizes is not None:
        inputs = concrete_inputs(graph, sizes)
    options = {
        **config.code.inductor_options,
        **inductor_passes(tuple(passes), lambda **_: None, 0),
    }
    with compiler.session(), reasoning_about_sizes(config.code.dynamic_shapes.value):
        fn, _ = compiler.compile(graph, inputs, options)()
    return fn


def static_sizes(
    piece: DebugPiece, config: CompileConfig, num_tokens: int
) -> dict[sympy.Symbol, int] | None:
    """The sizes of static code where `num_tokens` is a compile size of the piece, else None."""
    interval = range_of(config, num_tokens)
    alone = interval.exact and list(piece.symbols.values()) == [TOKENS]
    return piece.sizes(config, interval.low) if alone else None
