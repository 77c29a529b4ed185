"""Everything the page shows, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import Events, PreparedModel
from ...compile.ir.ops import resolve_op
from ...compile.ir.plan import CallStep, Plan
from ...compile.plan.report_plan import split_graph as plan_steps
from ...runtime.core.records import CaptureRecord, MemoryUse
from ...torch_compat.basics.ops import given_arguments
from ..engine.serving_log import StepRecord
from .advice import advise
from .against import SCHEMA

Facts = dict[str, Any]

MODES = ("NONE", "PIECEWISE", "FULL")


def collect(
    report: Facts,
    prepared: PreparedModel,
    steps: Sequence[StepRecord] = (),
    events: Events | None = None,
) -> Facts:
    """JSON-able facts of a startup and a run, from their report, events and steps.

    `events` are those of the whole process; without them the timeline begins with `prepare`.
    `report` may be that of the model alone, without what an engine adds to it.
    """
    records = prepared.records
    used = records.of(MemoryUse)
    facts: Facts = {
        "schema": SCHEMA,
        **{key: report.get(key) for key in ("created", "command", "versions", "machine")},
        "options": report.get("options"),
        "startup": report["startup"],
        "timeline": timeline(events or prepared.events),
        "background": report["background"],
        "cache": report["cache"],
        "counters": report["counters"],
        "lookups": records.compile.lookups,
        "graph_mode": report["graph_mode"],
        "remarks": report["remarks"],
        "warnings": report["warnings"],
        "settings": records.settings,
        "steps": split_graph(prepared),
        "pieces": pieces(prepared),
        "guards": guards(prepared),
        "policy": prepared.config.tracing.guards.value if prepared.config.compile else None,
        "regions": report["regions"],
        "captures": captures(prepared),
        "memory": used[-1].facts() if used else {"recordings": 0, "used": 0, "free": 0},
        "ledger": report["memory"],
        "forecast": report["memory_forecast"],
        "heat": heat([(step.mode, step.num_tokens, 1) for step in steps] or _counted(report)),
        "reasons": report["reasons"],
        "padding": padding(report["dispatch"]),
        "serving": report.get("serving"),
        "verification": report.get("verification"),
    }
    return {**facts, "advice": advise(facts)}


def split_graph(prepared: PreparedModel) -> list[Facts]:
    """The steps of the plan, with what they take and give, between inputs and results."""
    plan = prepared.compiled.plan
    steps = _with_written(plan, plan_steps(plan))
    shapes = {name: shape for step in steps for name, shape in step["takes"].items()}
    inputs = {item.name: shapes.get(item.name, "") for item in plan.inputs}
    results = {result.name: "" for result in plan.results}
    return [
        {"outer": "inputs", "takes": {}, "gives": inputs},
        *steps,
        {"outer": "results", "takes": results, "gives": {}},
    ]


def _with_written(plan: Plan, steps: list[Facts]) -> list[Facts]:
    """The steps, with a value that an op writes to as a new one that the op gives.

    Such an op often returns nothing: its results are what it writes.
    """
    now: dict[str, str] = {}
    shown: list[Facts] = []
    for step, facts in zip(plan.steps, steps, strict=True):
        takes = {now.get(name, name): shape for name, shape in facts["takes"].items()}
        gives = dict(facts["gives"])
        if step.kind == "call":
            for name in _written(step):
                now[name] = f"{name} written by step {len(shown)}"
                gives[now[name]] = facts["takes"].get(name, "")
        shown.append({**facts, "takes": takes, "gives": gives})
    return shown


def _written(step: CallStep) -> list[str]:
    """Names of the values that the op of `step` writes to, by its schema."""
    arguments = given_arguments(resolve_op(step.op), step.args, step.kwargs)
    return [
        value["ref"]
        for value, written in arguments
        if written and isinstance(value, dict) and "ref" in value
    ]


def pieces(prepared: PreparedModel) -> list[Facts]:
    """Each unique piece: its uses, its origin (compiled or loaded), the time for it, its source."""
    plan, records = prepared.compiled.plan, prepared.records.compile
    compiled = {built.piece: built for built in records.pieces}
    ready = "loaded" if prepared.config.compile else "not compiled"
    kernels = records.bundle.kernels if records.bundle is not None else None
    uses = plan.piece_uses()
    rows = []
    for index, piece in enumerate(plan.pieces):
        build = compiled.get(index)
        rows.append(
            {
                "piece": index,
                "digest": piece.digest,
                "nodes": piece.nodes,
                "used_by": [use for use, unique in enumerate(uses) if unique == index],
                "made": "compiled" if build else ready,
                "seconds": build and build.seconds,
                "kernels": build.kernels if build else (kernels[index] if kernels else None),
                "source": piece.text,
            }
        )
    return rows


def guards(prepared: PreparedModel) -> list[Facts]:
    """Guards on sizes, without those that are constant true."""
    guards = prepared.compiled.plan.guards
    return [guard.model_dump(mode="json") for guard in guards if guard.expression != "True"]


def captures(prepared: PreparedModel) -> list[Facts]:
    """Each entry of the capture plan, with what its capture took and how often it was used."""
    by_place = {
        (capture.mode, capture.num_tokens): capture
        for capture in prepared.records.of(CaptureRecord)
    }
    used = {(row["mode"], row["num_tokens"]): row["count"] for row in prepared.usage.rows()}
    rows = []
    for graph_index, entry in enumerate(prepared.dispatcher.plan.entries):
        place = (entry.mode.name, entry.descriptor.num_tokens)
        capture = by_place.get(place)
        rows.append(
            {
                "graph_index": graph_index,
                "mode": place[0],
                "num_tokens": place[1],
                "captured": capture is not None,
                "ms": capture and capture.ms,
                "bytes": capture.bytes if capture else 0,
                "segments": capture and capture.segments,
                "steps": used.get(place, 0),
            }
        )
    return rows


def _counted(report: Facts) -> list[tuple[str, int, int]]:
    """Steps by mode and padded size, for a model whose engine keeps no records of steps."""
    return [(row["mode"], row["num_tokens"], row["count"]) for row in report["dispatch"]]


def heat(steps: Sequence[tuple[str, int, int]]) -> Facts:
    """Steps as (mode, size, count), in columns of sizes that double: 1, 2, 3-4, 5-8, …"""
    columns = sorted({_column(size) for _, size, _ in steps})
    counts = {mode: dict.fromkeys(columns, 0) for mode in MODES}
    for mode, size, count in steps:
        counts[mode][_column(size)] += count
    return {
        "columns": [f"{low}-{high}" if low < high else str(low) for low, high in columns],
        "rows": [{"mode": mode, "counts": list(counts[mode].values())} for mode in MODES],
    }


def _column(size: int) -> tuple[int, int]:
    high = 1 << max(size - 1, 0).bit_length()
    return high // 2 + 1, high


def padding(dispatch: Sequence[Facts]) -> list[Facts]:
    """Rows run and rows wasted, by mode and padded size."""
    return [
        {
            "mode": row["mode"],
            "num_tokens": row["num_tokens"],
            "steps": row["count"],
            "rows": row["count"] * row["num_tokens"],
            "wasted": row["padded_tokens"],
            "share": row["padded_tokens"] / (row["count"] * row["num_tokens"]),
        }
        for row in dispatch
        if row["mode"] != "NONE"
    ]


OTHER_SECONDS, OTHER_SHARE = 0.01, 0.02
"""Time inside a span that no child span covers is shown from this duration."""


def timeline(events: Events) -> list[Facts]:
    """Spans in order of their start, in seconds since the events began.

    A span that its parts do not fill gets a row `other`, so that its parts add up to it. They are
    without pieces that workers compiled meanwhile.
    """
    spans = sorted(events.spans, key=lambda span: (span.start, span.depth))
    rows: list[Facts] = []
    for index, span in enumerate(spans):
        end = span.start + span.seconds
        inside = [each for each in spans[index + 1 :] if each.start <= end]
        parts = [
            each.seconds
            for each in inside
            if each.depth == span.depth + 1 and each.facts.get("by") != "worker"
        ]
        rows.append(_row(span.name, span.start, span.seconds, span.depth, span.facts))
        other = span.seconds - sum(parts)
        if parts and other > max(OTHER_SECONDS, OTHER_SHARE * span.seconds):
            facts = {"in": span.name}
            rows.append(_row("other", span.start, other, span.depth + 1, facts))
    return rows


def _row(name: str, start: float, seconds: float, depth: int, facts: Facts) -> Facts:
    text = " ".join(f"{name}={value}" for name, value in facts.items())
    return {"name": name, "start": start, "seconds": seconds, "depth": depth, "facts": text}
