"""Pieces: compute sections of the traced graph, copied into graphs of their own.

A piece takes only tensors and base symbols. It computes every other size from the symbols, even if
an earlier section computed it: equal layers stay equal and no size is passed between pieces. Every
piece returns a tuple.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from ...torch_compat.basics.symbolic import expression_of, fx_nodes_of, with_numbers
from ...torch_compat.compiling.piece_data import inputs_mode
from ..ir.ops import ALLOCATIONS
from ..trace.symbols import follows_calls
from .split import Section

VIEW_METHODS = frozenset(
    {"view", "view_as", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose"}
)

BaseSymbols = dict[sympy.Symbol, torch.SymInt]

HANDLE = "handle"
"""The tensor of the model, in the meta of a placeholder, if it may be a handle: ops take objects
such as packed weights by their address, as an integer."""


WEIGHT = "weight"
"""In the meta of a placeholder of a weight that nothing writes to: where it lies says nothing."""


def may_be_handle(tensor: torch.Tensor) -> bool:
    """Whether an op may follow the value of `tensor` as an address."""
    return tensor.numel() == 1 and not (tensor.dtype.is_floating_point or tensor.is_meta)


@dataclass(frozen=True, slots=True)
class Piece:
    """One compute section: its graph, and the values of the trace it takes and gives, in order."""

    graph: Graph
    inputs: tuple[Node | sympy.Symbol, ...]
    outputs: tuple[Node, ...]

    def module(self, root: torch.nn.Module) -> GraphModule:
        """A new copy to compile; compilers change the graph they get."""
        graph = Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return GraphModule(root, graph, class_name="Piece")

    def symbols(self) -> list[sympy.Symbol]:
        """The symbols in the sizes of its inputs, in order of first appearance."""
        return symbols_of(self.example_values())

    def example_values(self) -> list[Any]:
        """Fake tensors and symbolic ints for the inputs, in order."""
        return example_values(self.graph)


def example_values(graph: Graph) -> list[Any]:
    """Fake tensors and symbolic ints for the inputs of a piece's graph, in order."""
    return [node.meta["example_value"] for node in graph.find_nodes(op="placeholder")]


def symbols_of(values: Iterable[Any]) -> list[sympy.Symbol]:
    """The symbols in the sizes of tensors and in sizes, in order of first appearance."""
    symbols: dict[sympy.Symbol, None] = {}
    for value in values:
        sizes = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                expression = expression_of(size)
                symbols.update(dict.fromkeys(sorted(expression.free_symbols, key=str)))
    return list(symbols)


def inputs_with_numbers(graph: GraphModule, numbers: Sequence[int | None]) -> list[Any]:
    """The example values of a piece's inputs, with numbers for the symbols that have one.

    A symbol that is served at 1 alone must be that number. Else it is 1 to some of Inductor's
    decisions and any size to others: it broadcasts a row, and reads one for each of its results.
    """
    values = example_values(graph.graph)
    symbols = zip(symbols_of(values), numbers, strict=True)
    known = {symbol: number for symbol, number in symbols if number is not None}

    def with_known(value: Any) -> Any:
        if not known.keys() & symbols_of([value]):
            return value
        if isinstance(value, torch.SymInt):
            return with_numbers(value, known)
        sizes = [with_numbers(size, known) for size in value.shape]
        strides = [with_numbers(step, known) for step in value.stride()]
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)

    if not known:
        return values
    with inputs_mode(graph.graph):
        return [with_known(value) for value in values]


def size_positions(graph: Graph) -> tuple[int, ...]:
    """Positions of the size inputs of a piece's graph; the others are tensors."""
    inputs = enumerate(graph.find_nodes(op="placeholder"))
    return tuple(i for i, n in inputs if isinstance(n.meta["example_value"], torch.SymInt))


def unwritten_results(graph: Graph) -> tuple[int, ...]:
    """Positions of results that a piece's graph allocates, or views of such, and never writes."""
    (output,) = graph.find_nodes(op="output")

    def unwritten(node: Node) -> bool:
        return all(
            user is output or (user.target in VIEW_METHODS and unwritten(user))
            for user in node.users
        )

    def source(value: Any) -> Any:
        while isinstance(value, Node) and value.target in VIEW_METHODS:
            value = value.args[0]
        return value

    sources = enumerate(map(source, output.args[0]))
    return tuple(
        position
        for position, node in sources
        if isinstance(node, Node) and node.target in ALLOCATIONS and unwritten(node)
    )


def lift(
    section: Section,
    symbols: BaseSymbols,
    sizes: Collection[Node],
    handles: Mapping[Node, torch.Tensor],
    weights: Collection[Node] = (),
) -> Piece:
    """Copy a compute section into a piece. `symbols` has a SymInt for each base symbol; `sizes` are
    the nodes that are computed from these.

    `handles` are tensors that may hold an address; see HANDLE, and WEIGHT for `weights`. A tensor
    of which the rest of the trace reads only sizes is no result: it would be written to memory for
    nothing.
    """
    inside = set(section.nodes)
    builder = _Builder(symbols, sizes, handles, weights)
    for node in section.nodes:
        builder.copy(node)
    outputs = tuple(
        node
        for node in section.nodes
        if any(user not in inside and user not in sizes for user in node.users)
    )
    builder.graph.output(tuple(builder.values[node] for node in outputs))
    return Piece(_with_inputs_first(builder.graph), tuple(builder.inputs), outputs)


class _Builder:
    """Copies nodes into a new graph; values from outside become inputs or recomputed sizes."""

    def __init__(
        self,
        symbols: BaseSymbols,
        sizes: Collection[Node],
        handles: Mapping[Node, torch.Tensor],
        weights: Collection[Node],
    ) -> None:
        self.graph = Graph()
        self.inputs: list[Node | sympy.Symbol] = []
        self._handles = handles
        self._weights = weights
        self.values: dict[Node, Any] = {}
        self._placeholders: dict[Node | sympy.Symbol, Node] = {}
        self._symbols = symbols
        self._sizes = sizes

    def copy(self, node: Node) -> None:
        for used in node.all_input_nodes:
            if used not in self.values:
                self.values[used] = self._outer_value(used)
        self.values[node] = self.graph.node_copy(node, self.values.__getitem__)

    def _outer_value(self, node: Node) -> Any:
        value: Any = node.meta.get("example_value")
        if node.op == "get_attr":
            return self.graph.node_copy(node)
        if node not in self._sizes:
            return self._input(node, value)
        if isinstance(value, torch.Size):
            return tuple(self.size(dim) for dim in value)
        if follows_calls(node, self._sizes):
            self.copy(node)
            return self.values[node]
        return self.size(value)

    def size(self, value: int | torch.SymInt) -> Any:
        """A size as a number, a symbol's placeholder, or nodes that compute it from those."""
        if not isinstance(value, torch.SymInt):
            return value
        expression = expression_of(value)
        if expression.is_Integer:
            return int(expression)
        tracer = GraphAppendingTracer(self.graph)  # functions as torch.sym_max need one for all
        placeholders = {
            symbol: Proxy(self._input(symbol, self._symbols[symbol]), tracer)
            for symbol in sorted(expression.free_symbols, key=str)
        }
        result = fx_nodes_of(expression, placeholders)
        node: Node = result.node
        node.meta.setdefault("example_value", value)
        return node

    def _input(self, key: Node | sympy.Symbol, value: Any) -> Node:
        if key not in self._placeholders:
            node = self.graph.placeholder(f"a{len(self.inputs)}")
            node.meta["example_value"] = value
            if isinstance(key, Node) and key in self._handles:
                node.meta[HANDLE] = self._handles[key]
            if key in self._weights:
                node.meta[WEIGHT] = True
            self._placeholders[key] = node
            self.inputs.append(key)
        return self._placeholders[key]


def _with_inputs_first(graph: Graph) -> Graph:
    """FX requires placeholders before other nodes; they were added where first needed."""
    first = next(iter(graph.nodes))
    for node in graph.find_nodes(op="placeholder"):
        if node is first:
            first = node.next
        else:
            first.prepend(node)
    return graph
