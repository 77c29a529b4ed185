"""Report the parts of a compiled model, in the same form after a trace and a warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from ...events import Events, trace_artifact
from ..ir.locations import graph_source
from ..ir.plan import CallStep, Plan, PlanPiece, UserInput, Weight
from .codegen import step_source, used


def report_plan(plan: Plan, events: Events) -> None:
    """Emit the split graph, each unique piece and its uses, the guards, the step source."""
    events.detail("split_graph", lambda: {"steps": split_graph(plan)})
    uses = plan.piece_uses()
    for index, piece in enumerate(plan.pieces):
        _report_piece(
            index, piece, [use for use, unique in enumerate(uses) if unique == index], events
        )
    events.detail("guards", lambda: {"guards": [guard.model_dump() for guard in plan.guards]})
    trace_artifact("stitched", lambda: step_source(plan)[0])


def _report_piece(index: int, piece: PlanPiece, uses: list[int], events: Events) -> None:
    events.detail(
        "piece",
        lambda: {"piece": index, "digest": piece.digest, "nodes": piece.nodes, "used_by": uses},
    )
    trace_artifact(f"piece_{index}", lambda: piece.text)


def dump_plan(plan: Plan, graph: GraphModule, directory: Path) -> None:
    """Write `graph.py`, `piece_<n>.py`, `stitched.py` and `plan.json`, replacing older ones."""
    directory.mkdir(parents=True, exist_ok=True)
    for index, piece in enumerate(plan.pieces):
        (directory / f"piece_{index}.py").write_text(piece.text)
    (directory / "graph.py").write_text(graph_source(graph))
    (directory / "stitched.py").write_text(step_source(plan)[0])
    (directory / "plan.json").write_text(plan.model_dump_json(indent=1))


def split_graph(plan: Plan) -> list[dict[str, Any]]:
    """The steps in order: piece or op, and the values they take and give, with their forms."""
    steps: list[dict[str, Any]] = []
    for step in plan.steps:
        if isinstance(step, CallStep):
            taken = list(dict.fromkeys(used(step)))
            steps.append({"op": step.op, "takes": taken, "gives": [o for o in step.outs if o]})
        else:
            steps.append({"piece": step.piece, "takes": step.args, "gives": step.outs})
    shown = {**plan.shapes, **_outer_shapes(plan)}
    return [
        {**step, **{k: {n: shown.get(n, "") for n in step[k]} for k in ("takes", "gives")}}
        for step in steps
    ]


def _outer_shapes(plan: Plan) -> dict[str, str]:
    """Dtype and shape of inputs and weights, with labels for dynamic sizes; labels of symbols."""
    labels = {symbol.name: symbol.label for symbol in plan.symbols}
    outer: list[UserInput | Weight] = [*plan.inputs, *plan.weights]
    shapes = dict(labels)
    for item in outer:
        sizes = ", ".join(labels.get(str(size), str(size)) for size in item.shape)
        shapes[item.name] = f"{item.dtype}[{sizes}]"
    return shapes
