"""Everything the page shows, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import Events, PreparedModel
from ...compile.lower.report_plan import split_graph as plan_steps
from ...runtime.records import CaptureFailure, CaptureRecord, ForecastAccuracy, MemoryUse
from ..engine.engine import StepRecord
from .advice import advise

Facts = dict[str, Any]

MODES = ("NONE", "PIECEWISE", "FULL")


def collect(report: Facts, prepared: PreparedModel, steps: Sequence[StepRecord]) -> Facts:
    """JSON-able facts of a run, from its report, its events and its steps."""
    records = prepared.records
    facts: Facts = {
        "versions": report["versions"],
        "options": report["options"],
        "startup": report["startup"],
        "timeline": timeline(prepared.events),
        "cache": report["cache"],
        "counters": report["counters"],
        "lookups": records.compile.lookups,
        "graph_mode": report["graph_mode"],
        "settings": records.settings,
        "steps": split_graph(prepared),
        "pieces": pieces(prepared),
        "guards": guards(prepared),
        "policy": prepared.config.guards.value,
        "captures": captures(prepared),
        "memory": records.of(MemoryUse)[-1].facts(),
        "ledger": report["memory"],
        "forecast": [record.facts() for record in records.of(ForecastAccuracy)],
        "failed": [record.facts() for record in records.of(CaptureFailure)],
        "heat": heat(steps),
        "reasons": report["reasons"],
        "padding": padding(report["dispatch"]),
        "serving": report["serving"],
        "verification": report["verification"],
    }
    return {**facts, "advice": advise(facts)}


def timeline(events: Events) -> list[Facts]:
    """Spans in order of their start, in seconds since the events began."""
    spans = sorted(events.spans, key=lambda span: (span.start, span.depth))
    return [
        {
            "name": span.name,
            "start": span.start,
            "seconds": span.seconds,
            "depth": span.depth,
            "facts": " ".join(f"{name}={value}" for name, value in span.facts.items()),
        }
        for span in spans
    ]


def split_graph(prepared: PreparedModel) -> list[Facts]:
    """The steps of the plan, with what they take and give, between inputs and results."""
    plan = prepared.compiled.plan
    steps = plan_steps(plan)
    shapes = {name: shape for step in steps for name, shape in step["takes"].items()}
    inputs = {item.name: shapes.get(item.name, "") for item in plan.inputs}
    results = {result.name: "" for result in plan.results}
    return [
        {"outer": "inputs", "takes": {}, "gives": inputs},
        *steps,
        {"outer": "results", "takes": results, "gives": {}},
    ]


def pieces(prepared: PreparedModel) -> list[Facts]:
    """Each unique piece: its uses, how it came to be, how long that took, its source."""
    plan, records = prepared.compiled.plan, prepared.records.compile
    compiled = {built.piece: built for built in records.pieces}
    ready = "loaded" if prepared.config.compile else "not compiled"
    kernels = records.bundle.kernels if records.bundle is not None else None
    uses = plan.piece_uses()
    cut = f" in {plan.partitions()} partitions" if plan.partitions() else ""
    rows = []
    for index, piece in enumerate(plan.pieces):
        made = compiled.get(index)
        rows.append(
            {
                "piece": index,
                "digest": piece.digest,
                "nodes": piece.nodes,
                "used_by": [use for use, unique in enumerate(uses) if unique == index],
                "made": ("compiled" if made else ready) + cut,
                "seconds": made and made.seconds,
                "kernels": made.kernels if made else (kernels[index] if kernels else None),
                "source": piece.text,
            }
        )
    return rows


def guards(prepared: PreparedModel) -> list[Facts]:
    """The guards on sizes; those that came out as plain `True` say nothing."""
    settled = prepared.compiled.plan.guards
    return [guard.model_dump(mode="json") for guard in settled if guard.expression != "True"]


def captures(prepared: PreparedModel) -> list[Facts]:
    """Each entry of the capture plan, with what its capture took and how often it was used."""
    made = {
        (capture.mode, capture.num_tokens): capture
        for capture in prepared.records.of(CaptureRecord)
    }
    used = {(row["mode"], row["num_tokens"]): row["count"] for row in prepared.usage.rows()}
    rows = []
    for graph_index, entry in enumerate(prepared.dispatcher.plan.entries):
        place = (entry.mode.name, entry.descriptor.num_tokens)
        capture = made.get(place)
        rows.append(
            {
                "slot": graph_index,
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


def heat(steps: Sequence[StepRecord]) -> Facts:
    """Steps by runtime mode and by size, in columns that double: 1, 2, 3-4, 5-8, …"""
    columns = sorted({_column(step.num_tokens) for step in steps})
    counts = {mode: dict.fromkeys(columns, 0) for mode in MODES}
    for step in steps:
        counts[step.mode][_column(step.num_tokens)] += 1
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
