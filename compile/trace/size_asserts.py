"""Runtime assertions about sizes, taken out of a traced graph to be proved as guards.

Tracing with unbacked sizes writes what it assumed into the graph as assertion nodes. They would run
at every step and make the first piece differ from the others; a proof makes them unnecessary.
An assertion about a size that depends on data stays in the graph.
"""

from __future__ import annotations

from collections.abc import Collection

import sympy
import torch
from torch.fx import Graph, Node

from ...torch_compat.basics.symbolic import expression_of
from ..ir.locations import node_location

SizeAssert = tuple[sympy.Basic, str | None]
"""What must hold, and the file:line of the user's code that assumed it."""


def take_size_asserts(graph: Graph, symbols: Collection[sympy.Symbol]) -> list[SizeAssert]:
    """Remove the assertions over `symbols` alone from `graph` and return them in order."""
    taken: list[SizeAssert] = []
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten._assert_scalar.default:
            continue
        condition = node.args[0]
        value = condition.meta["example_value"] if isinstance(condition, Node) else condition
        if isinstance(value, torch.SymBool):
            expression = expression_of(value)
        else:
            expression = sympy.true if value else sympy.false
        if expression.free_symbols <= set(symbols):
            taken.append((expression, node_location(node)))
            _erase(graph, node)
    return taken


def _erase(graph: Graph, node: Node) -> None:
    """Erase an unused node, and the size arithmetic that only it used."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for used in inputs:
        value = used.meta.get("example_value")
        is_arithmetic = isinstance(value, (torch.SymBool, torch.SymInt, bool, int))
        if is_arithmetic and not used.users and used.op != "placeholder":
            _erase(graph, used)
