"""The plan as a graph of steps: the proof that it can run in its order, and the data of a picture.

Nodes are the steps' indices. An edge says that the later step needs the earlier one, because it
reads a value that the earlier one made, or because a splitting op writes what the other touches.
"""

from __future__ import annotations

from typing import Any

import networkx as nx
import torch

from ...errors import IllegalOrder
from ..ir.plan import CallStep, PieceStep, Plan
from ..ir.serialization import decode, refs
from .codegen import resolve_op, used


def piece_graph(plan: Plan) -> nx.DiGraph:
    """Steps and why they follow one another; edges carry the `values` they are about.

    Raises IllegalOrder where a step reads a value before it is made, or makes one twice.
    """
    graph = nx.DiGraph()
    makers: dict[str, int] = {}
    touched: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        graph.add_node(index, **_described(step))
        for name in used(step):
            if name.startswith("t") and name not in makers:
                raise IllegalOrder(step=index, value=name, fault="before any step makes it")
            if name in makers:
                _connect(graph, makers[name], index, name)
        for name in _written(step):
            for earlier in touched.get(name, []):
                _connect(graph, earlier, index, name)
            makers[name] = index
        for name in used(step):
            touched.setdefault(name, []).append(index)
        for name in filter(None, step.outs):
            if name in makers:
                raise IllegalOrder(step=index, value=name, fault="though another step makes it")
            makers[name] = index
    return graph


def picture(graph: nx.DiGraph) -> dict[str, Any]:
    """Steps with their depth in the graph, and edges: what a tool draws, as JSON-able data."""
    layers = enumerate(nx.topological_generations(graph))
    depth = {index: level for level, indices in layers for index in indices}
    return {
        "steps": [{"depth": depth[i], **facts} for i, facts in sorted(graph.nodes(data=True))],
        "edges": [[a, b, data["values"]] for a, b, data in sorted(graph.edges(data=True))],
    }


def _connect(graph: nx.DiGraph, earlier: int, later: int, name: str) -> None:
    if earlier == later:
        return
    if not graph.has_edge(earlier, later):
        graph.add_edge(earlier, later, values=[])
    values = graph.edges[earlier, later]["values"]
    if name not in values:
        values.append(name)


def _described(step: PieceStep | CallStep) -> dict[str, Any]:
    if isinstance(step, PieceStep):
        return {"kind": "piece", "label": f"piece {step.piece}"}
    return {"kind": "call", "label": step.op}


def _written(step: PieceStep | CallStep) -> list[str]:
    """Values that a splitting op changes in place, by its schema."""
    if isinstance(step, PieceStep):
        return []
    op: Any = resolve_op(step.op)
    schema: torch.FunctionSchema = op._schema
    given = {
        **{arg.name: value for arg, value in zip(schema.arguments, step.args, strict=False)},
        **step.kwargs,
    }
    changed = [arg.name for arg in schema.arguments if arg.alias_info and arg.alias_info.is_write]
    return [str(ref) for name in changed for ref in refs(decode(given.get(name)))]
