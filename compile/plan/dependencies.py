"""Which steps of a plan depend on which: proof that the plan's order is legal, and data to draw.

A later step depends on an earlier one if it reads a value that the earlier one made, or if one of
them writes a value in place that the other one touches.
"""

from __future__ import annotations

from typing import Any

from ...errors import IllegalOrder
from ...torch_compat.basics.ops import mutated_arguments
from ..ir.ops import resolve_op
from ..ir.plan import CallStep, PieceStep, Plan
from ..ir.serialization import decode, refs
from .codegen import used

Dependencies = dict[tuple[int, int], list[str]]
"""(earlier step, later step): the values that connect them."""


def dependencies(plan: Plan) -> Dependencies:
    """The dependencies between the steps of `plan`, by index.

    Raises IllegalOrder where a step reads a value before it is made, or makes one twice.
    """
    edges: Dependencies = {}
    makers: dict[str, int] = {}
    touched: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        for name in used(step):
            if name.startswith("t") and name not in makers:
                raise IllegalOrder(step=index, value=name, fault="before any step makes it")
            if name in makers:
                _connect(edges, makers[name], index, name)
        for name in _written(step):
            for earlier in touched.get(name, []):
                _connect(edges, earlier, index, name)
            makers[name] = index
        for name in used(step):
            touched.setdefault(name, []).append(index)
        for name in filter(None, step.outs):
            if name in makers:
                raise IllegalOrder(step=index, value=name, fault="though another step makes it")
            makers[name] = index
    return edges


def drawing(plan: Plan, edges: Dependencies) -> dict[str, Any]:
    """Steps with their depth, and edges, as JSON data for tools that draw them."""
    depths = [0] * len(plan.steps)
    for earlier, later in sorted(edges, key=lambda edge: edge[1]):
        depths[later] = max(depths[later], depths[earlier] + 1)
    return {
        "steps": [
            {"depth": depth, **_described(step)}
            for depth, step in zip(depths, plan.steps, strict=True)
        ],
        "edges": [[*edge, values] for edge, values in sorted(edges.items())],
    }


def _connect(edges: Dependencies, earlier: int, later: int, name: str) -> None:
    values = edges.setdefault((earlier, later), []) if earlier != later else [name]
    if name not in values:
        values.append(name)


def _described(step: PieceStep | CallStep) -> dict[str, Any]:
    if isinstance(step, PieceStep):
        return {"kind": "piece", "label": f"piece {step.piece}"}
    return {"kind": "call", "label": step.op}


def _written(step: PieceStep | CallStep) -> list[str]:
    """Values that a splitting op changes in place."""
    if isinstance(step, PieceStep):
        return []
    written = mutated_arguments(resolve_op(step.op), step.args, step.kwargs)
    return [str(ref) for value in written for ref in refs(decode(value))]
