"""The dependency graph of a plan: proof that the plan's order is legal, and data to draw.

A later step depends on an earlier one if it reads a value that the earlier one makes, or if one of
them writes a value in place that the other one touches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import IllegalOrder
from ...torch_compat.basics.ops import mutated_arguments
from ..ir.ops import resolve_op
from ..ir.plan import CallStep, PieceStep, Plan
from ..ir.serialization import decode, refs
from .codegen import used

if TYPE_CHECKING:
    from networkx import DiGraph


def dependencies(plan: Plan) -> DiGraph:
    """The steps of `plan` by index; an edge has the `values` that connect two steps.

    Raises IllegalOrder where a step reads a value before it is made, or makes one twice.
    """
    from networkx import DiGraph  # only a cold start needs it

    graph = DiGraph()
    writers: dict[str, int] = {}
    touched: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        label = f"piece {step.piece}" if isinstance(step, PieceStep) else step.op
        graph.add_node(index, kind=step.kind, label=label)
        for name in used(step):
            if name.startswith("t") and name not in writers:
                raise IllegalOrder(step=index, value=name, fault="before any step makes it")
            _connect(graph, writers.get(name, index), index, name)
        for name in _written(step):
            for earlier in touched.get(name, []):
                _connect(graph, earlier, index, name)
            writers[name] = index
        for name in used(step):
            touched.setdefault(name, []).append(index)
        for name in filter(None, step.outs):
            if name in writers:
                raise IllegalOrder(step=index, value=name, fault="though another step makes it")
            writers[name] = index
    return graph


def drawing(graph: DiGraph) -> dict[str, Any]:
    """Steps with their depth, and edges, as JSON data for tools that draw them."""
    from networkx import topological_generations

    for depth, steps in enumerate(topological_generations(graph)):
        for step in steps:
            graph.nodes[step]["depth"] = depth
    edges = graph.edges(data="values")
    return {"steps": [facts for _, facts in graph.nodes(data=True)], "edges": list(edges)}


def _connect(graph: DiGraph, earlier: int, later: int, name: str) -> None:
    if earlier == later:
        return
    values = graph.get_edge_data(earlier, later, {"values": []})["values"]
    graph.add_edge(earlier, later, values=list(dict.fromkeys([*values, name])))


def _written(step: PieceStep | CallStep) -> list[str]:
    """Values that a splitting op changes in place."""
    if isinstance(step, PieceStep):
        return []
    written = mutated_arguments(resolve_op(step.op), step.args, step.kwargs)
    return [str(ref) for value in written for ref in refs(decode(value))]
