"""One captured graph as a table: its parts in order, what each takes, its operators and kernels.

Operators, shapes and kernels are those of the trace that `capture(profile_dir=...)` writes: of the
run before the capture, which launches what the graph replays. What an argument is the plan knows.
The operations are the nodes of the graph itself, of CUDA's as the driver tells them, each with what
lies where it reads and writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import PreparedModel
from ...compile.ir.plan import CallStep, Plan
from ...compile.plan.step_names import call_names, piece_names
from ...errors import InvalidSetting
from ...runtime.backends.protocol import Argument
from ...runtime.capture.recording import Recording
from ..report.sections import ReportSection, Table, as_markdown, columns

Facts = dict[str, Any]


def find_graph(prepared: PreparedModel, text: str) -> int:
    """The index of the captured graph that a text such as `FULL:256` names; raises InvalidSetting
    with those that there are."""
    entries = prepared.dispatcher.plan.entries
    shapes = {i: f"{entries[i].mode.name}:{entries[i].descriptor.num_tokens}" for i, _ in (
        prepared.recordings()
    )}  # fmt: skip
    found = next((i for i, shape in shapes.items() if shape == text.upper()), None)
    if found is None:
        expected = f"one of {', '.join(shapes.values()) or 'none: nothing is captured'}"
        raise InvalidSetting(
            name="--graph", value=text, reason="there is no such graph", expected=expected
        )
    return found


def graph_facts(prepared: PreparedModel, graph_index: int, folder: Path) -> Facts:
    """The parts of a graph in order, from its trace in `folder`; JSON-able."""
    entry = prepared.dispatcher.plan.entries[graph_index]
    form = prepared.compiled.forms()[entry.descriptor.form]
    plan = form.plan.at(entry.descriptor.num_tokens)
    recording = dict(prepared.recordings())[graph_index]
    notes = recording.notes
    name = re.sub(r"\W+", "_", entry.shape)
    events = json.loads((folder / f"{name}.json").read_text())["traceEvents"]
    names, takes = _parts(plan)
    unwatched = [row for row in prepared.report()["unwatched"] if row["recording"] == entry.shape]
    return {
        "graph": entry.shape,
        "parts": [
            {"part": part, "takes": taken, "nodes": nodes}
            for part, taken, nodes in zip(names, takes, _nodes(events, names), strict=False)
        ],
        "operations": list(_operations(prepared, graph_index, recording, plan)),
        "reads": notes.facts() if notes else {},
        "unknown": [name for row in unwatched for name in row["tensors"]],
    }


def _operations(
    prepared: PreparedModel, graph_index: int, recording: Recording, plan: Plan
) -> Iterator[Facts]:
    """Each node of the graph in order, its part, and its arguments."""
    memory = prepared.parts.log.memory.get(graph_index, {})
    pieces = piece_names(plan)
    between = _between(plan)
    begun = 0
    for part in (each for graph in recording.graphs for each in graph.parts):
        begun += part.is_piece
        name = pieces[begun - 1] if part.is_piece else between[begun]
        for node in part.nodes:
            arguments = [
                {"what": _what(each, memory), "shape": each.shape} for each in node.arguments
            ]
            if node.unread:
                arguments.append({"what": f"unknown: {node.unread}", "shape": None})
            yield {
                "part": name, "op": node.op, "node": node.kind, "kernel": node.kernel,
                "launch": node.launch, "arguments": arguments,
            }  # fmt: skip


def _between(plan: Plan) -> list[str]:
    """What runs before the first piece and after each: the names of the calls."""
    calls, between = iter(call_names(plan)), [list[str]()]
    for step in plan.steps:
        if step.kind == "call":
            between[-1].append(next(calls))
        else:
            between.append([])
    return [", ".join(names) for names in between]


def _what(argument: Argument, memory: Mapping[range, str]) -> str:
    """The tensor that begins last before the address, in the same memory."""
    places = [place for place in memory if argument.address in place]
    if places:
        return memory[max(places, key=lambda place: place.start)]
    return "intermediate" if argument.is_made else "unknown"


def _parts(plan: Plan) -> tuple[list[str], list[dict[str, str]]]:
    """Names of the steps in order, and what each of their arguments is."""
    what = {item.name: f"input {item.label}" for item in plan.inputs}
    what |= {weight.name: f"weight {weight.target}" for weight in plan.weights}
    what |= {symbol.name: f"size {symbol.label}" for symbol in plan.symbols}
    pieces, calls = iter(piece_names(plan)), iter(call_names(plan))
    names = [next(calls if step.kind == "call" else pieces) for step in plan.steps]
    return names, [
        {name: what.get(name, "intermediate") for name in _arguments(step)} for step in plan.steps
    ]


def _arguments(step: Any) -> Sequence[str]:
    """Names of the values that a step takes."""
    if not isinstance(step, CallStep):
        return step.args  # type: ignore[no-any-return]
    values = [*step.args, *step.kwargs.values()]
    return [value["ref"] for value in values if isinstance(value, dict) and "ref" in value]


def _nodes(events: Sequence[Facts], names: Sequence[str]) -> Iterator[list[Facts]]:
    """The operators of each part, in the first run of all of them."""
    events = sorted(
        (e for e in events if e.get("ph") == "X"), key=lambda e: (float(e["ts"]), -float(e["dur"]))
    )
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in {*names}]
    kernels = {
        e["args"]["correlation"]: e["name"]
        for e in events
        if e.get("cat") == "kernel" and "correlation" in e.get("args", {})
    }
    for part in ranges[: len(names)]:
        inside = [e for e in events if e is not part and _within(e, part)]
        yield list(_outermost(inside, kernels))


def _outermost(events: Sequence[Facts], kernels: Mapping[int, str]) -> Iterator[Facts]:
    """Operators that no other one calls, with the kernels launched inside of each."""
    outer: Facts | None = None
    for event in events:
        if event.get("cat") != "cpu_op" or (outer is not None and _within(event, outer)):
            continue
        outer = event
        launched = [
            kernels[number]
            for each in events
            if _within(each, event)
            and (number := each.get("args", {}).get("correlation")) in kernels
        ]
        shapes = [dims for dims in event.get("args", {}).get("Input Dims", ()) if dims]
        yield {"op": event["name"], "shapes": shapes, "kernels": launched}


def _within(event: Facts, outer: Facts) -> bool:
    start, end = float(outer["ts"]), float(outer["ts"]) + float(outer["dur"])
    return event["tid"] == outer["tid"] and start <= float(event["ts"]) <= end


def rendered_graph(facts: Facts, form: str) -> str:
    """The facts as `json`, else as Markdown."""
    if form == "json":
        return json.dumps(facts, indent=2) + "\n"
    rows = [
        (part["part"] if not n else "", node["op"], node["shapes"], ", ".join(node["kernels"]))
        for part in facts["parts"]
        for n, node in enumerate(part["nodes"] or [{"op": "-", "shapes": "", "kernels": []}])
    ]
    takes = [
        (part["part"], name, what)
        for part in facts["parts"]
        for name, what in part["takes"].items()
    ]
    operations = [
        (*(("", "", "") if n else of), argument["what"], argument["shape"] or "")
        for each in facts["operations"]
        for of in [(each["part"], each["op"], _node_text(each))]
        for n, argument in enumerate(each["arguments"] or [{"what": "nothing", "shape": ""}])
    ]
    reads = [(path, value) for path, value in facts["reads"].items()]
    reads += [(name, "unknown: no step checks its address") for name in facts["unknown"]]
    tables = [
        Table(rows, columns("part", "op", "shapes", "kernels"), "Nodes in order"),
        Table(takes, columns("part", "argument", "what it is"), "What each part takes"),
        Table(operations, columns("part", "operation", "node", "argument", "shape"), "Operations"),
        Table(reads, columns("read", "value, and where"), "Metadata and state"),
    ]
    return as_markdown(ReportSection(f"Graph {facts['graph']}", tables)) + "\n"


def _node_text(node: Facts) -> str:
    """`kernel gemm grid [8, 1, 1] block [128, 1, 1]`."""
    launch = [f"{name} {value}" for name, value in node["launch"].items()]
    return " ".join(filter(None, (node["node"], node["kernel"], *launch)))
