"""Runtime assertions about sizes, taken out of a traced graph to be proved as guards.

Tracing with unbacked sizes writes what it assumed into the graph as assertion nodes. They would run
at every step and make the first piece differ from the others; a proof makes them unnecessary.
An assertion about a size that depends on data stays in the graph, and so do those about values.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from ...torch_compat.basics.symbolic import expression_of
from ..ir.locations import node_location
from .dynamo import Trace
from .symbols import sizes_of

SizeAssert = tuple[sympy.Basic, str | None]
"""What must hold, and the file:line of the user's code that assumed it."""


def take_size_asserts(trace: Trace) -> list[SizeAssert]:
    """Remove the assertions about sizes of arguments from the graph and return them in order.

    Those about values are kept from being dropped."""
    keep_value_asserts(trace.graph)
    graph, follow = trace.graph.graph, sizes_of(trace)
    taken: list[SizeAssert] = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        condition = node.args[0]
        if isinstance(condition, Node) and condition not in follow:
            continue
        value = condition.meta["example_value"] if isinstance(condition, Node) else condition
        if isinstance(value, torch.SymBool):
            expression = expression_of(value)
        else:
            expression = sympy.true if value else sympy.false
        taken.append((expression, node_location(node)))
        _erase(graph, node)
    return taken


def keep_value_asserts(graph: GraphModule) -> None:
    """Give assertions about values the message that torch has for them: AOTAutograd drops an
    assertion without one."""
    for module in (each for each in graph.modules() if isinstance(each, GraphModule)):
        for node in module.graph.nodes:
            name = getattr(node.target, "__name__", "")
            if name in ("_assert_async", "_assert_async.default") and len(node.args) == 1:
                node.target = getattr(node.target, "overloadpacket", node.target)
                node.args = (*node.args, "Expected Tensor with single nonzero value, but got zero")


def _erase(graph: Graph, node: Node) -> None:
    """Erase an unused node, and the size arithmetic that only it used."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for used in inputs:
        value = used.meta.get("example_value")
        is_arithmetic = isinstance(value, (torch.SymBool, torch.SymInt, bool, int))
        if is_arithmetic and not used.users and used.op != "placeholder":
            _erase(graph, used)
