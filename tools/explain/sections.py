"""The sections of an explanation, from its facts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..report.sections import ReportSection, Table, columns, size
from .against import against_section
from .picture import picture

Facts = dict[str, Any]

NO_LIMIT = 2**60
"""Bytes free on a device without a limit are reported as at least this many."""


def sections(facts: Facts) -> list[ReportSection]:
    """One section for each subject, in the order of a startup and a run."""
    against, mode = facts.get("against"), facts["graph_mode"]
    compared = [against_section(against["differences"], against)] if against else []
    warnings = [(each["what"], each["todo"]) for each in facts["advice"]]
    reasons = [(reason,) for reason in mode["reasons"]]
    asked = f"Asked for: {mode['requested'] or 'nothing'}. In use: {mode['resolved']}."
    return [
        *compared,
        ReportSection(
            "Warnings",
            [Table(warnings, columns("what", "what to do", what_to_do="text"))],
            id="warnings",
        ),
        _startup(facts),
        ReportSection(
            "Split graph",
            notes=[
                "Boxes of one color are uses of one unique piece; dashed ones are splitting ops."
                " Lines carry values; those to the right skip steps."
            ],
            id="graph",
            picture=picture(facts["steps"]),
        ),
        _pieces(facts),
        _guards(facts) if facts["policy"] else _regions(facts),
        _cache(facts),
        ReportSection(
            "Graph mode",
            [Table(reasons, columns("why"), empty="It is the mode that was asked for.")],
            [asked],
            id="mode",
        ),
        _captures(facts),
        _dispatch(facts),
        _padding(facts),
        ReportSection(
            "Settings",
            id="settings",
            details=[("Resolved configuration", json.dumps(facts["settings"], indent=2))],
            is_open=False,
        ),
    ]


def _startup(facts: Facts) -> ReportSection:
    spans = facts["timeline"]
    end = max((span["start"] + span["seconds"] for span in spans), default=0.0) or 1.0
    rows = [
        (
            "\N{NO-BREAK SPACE}" * 2 * span["depth"] + f"{span['name']} {span['facts']}".rstrip(),
            f"{span['start']:.3f}",
            f"{span['seconds']:.3f}",
            None if span["name"] == "other" else (span["start"] / end, span["seconds"] / end),
        )
        for span in spans
    ]
    heads = columns("phase", "start", "seconds", "when", when="bar")
    caption = "Seconds since the first row began; “other” is time that no row below explains"
    return ReportSection("Startup", [Table(rows, heads, caption)], id="startup")


def _guards(facts: Facts) -> ReportSection:
    rows = [
        (
            *(guard[fact] for fact in ("expression", "where", "origin")),
            "yes" if guard["proved"] else "no",
            guard["method"],
        )
        for guard in facts["guards"]
    ]
    texts = ("where", "from", "proved", "by")
    heads = columns("guard", *texts, **dict.fromkeys(texts, "text"), guard="code")
    table = Table(rows, heads, empty="Tracing left no guard on a size.")
    return ReportSection("Guards", [table], [f"Policy: {facts['policy']}."], id="guards")


def _regions(facts: Facts) -> ReportSection:
    """Of a model that is not traced."""
    names = ("function", "where", "seconds", "generated")
    rows = [tuple(region[name] for name in names) for region in facts["regions"]]
    nothing = "The model is not traced, and no function that it compiles itself ran."
    table = Table(rows, columns(*names, where="text"), empty=nothing)
    return ReportSection("Compiled regions", [table], id="regions")


def _pieces(facts: Facts) -> ReportSection:
    pieces = facts["pieces"]
    rows = [
        (
            piece["piece"],
            piece["digest"][:12],
            piece["nodes"],
            len(piece["used_by"]),
            piece["made"],
            piece["seconds"] and f"{piece['seconds']:.2f}",
            piece["kernels"],
        )
        for piece in pieces
    ]
    heads = columns(
        *("piece", "digest", "nodes", "uses", "made", "seconds", "kernel libraries"),
        digest="code",
        made="text",
    )
    return ReportSection(
        "Pieces",
        [Table(rows, heads, ids=[f"piece-{piece['piece']}" for piece in pieces])],
        id="pieces",
        details=[
            (f"Source of piece {piece['piece']}", piece["source"])
            for piece in pieces
            if piece["source"]
        ],
    )


def _cache(facts: Facts) -> ReportSection:
    cache = facts["cache"]
    outcome = "Hit" if cache["hit"] else f"Miss: {cache['reason']}"
    return ReportSection(
        "Cache",
        notes=[
            f"{outcome}. {cache['entries']} entries, {size(cache['bytes'])} stored.",
            *(f"Not cacheable: {each}." for each in cache["not_cacheable"]),
        ],
        id="cache",
        details=list(_lookups(facts)),
    )


def _lookups(facts: Facts) -> Iterator[tuple[str, str]]:
    """Each lookup: its outcome, and the factors of its key."""
    for row in facts["lookups"]:
        verdict = f"hit in layer {row['layer']}" if row["hit"] else f"miss, {row['reason']}"
        differs = [] if row["hit"] else row["differs"] or []
        lines = ["differs from the nearest entry in:", *differs, ""] if differs else []
        factors = json.dumps(row["factors"], indent=2, default=str)
        yield f"{row['kind']}/{row['key'][:12]}: {verdict}", "\n".join([*lines, factors])


def _captures(facts: Facts) -> ReportSection:
    memory, rows = facts["memory"], facts["captures"]
    free = f", {size(memory['free'])} are free" if memory["free"] < NO_LIMIT else ""
    notes = [
        f"Recordings hold {size(memory['recordings'])}; the device uses"
        f" {size(memory['used'])}{free}."
    ]
    notes += [
        f"Forecast before the captures: {size(row['forecast'])}; actual: {size(row['actual'])}."
        for row in facts["forecast"]
    ]
    largest = max((row["bytes"] for row in rows), default=0) or 1
    plan = [
        (
            row["graph_index"],
            row["mode"],
            row["num_tokens"],
            f"{row['ms']:.1f}" if row["captured"] else "not captured",
            row["segments"],
            size(row["bytes"]),
            (0.0, row["bytes"] / largest),
            row["steps"],
        )
        for row in rows
    ]
    heads = columns(
        *("entry", "mode", "tokens", "ms", "segments", "memory", "share", "steps"),
        mode="text",
        share="bar",
    )
    owners = [(row["owner"], size(row["bytes"])) for row in facts["ledger"]]
    held = Table(owners, columns("owner", "memory"), "Who holds the device's memory")
    return ReportSection("Capture plan", [Table(plan, heads), held], notes, id="captures")


def _dispatch(facts: Facts) -> ReportSection:
    heat = facts["heat"]
    hottest = max((n for row in heat["rows"] for n in row["counts"]), default=0) or 1
    rows = [
        (row["mode"], *((count or "", count / hottest) for count in row["counts"]))
        for row in heat["rows"]
    ]
    heads = columns("mode", *heat["columns"], **dict.fromkeys(heat["columns"], "heat"))
    by_size = Table(rows, heads, "Steps by runtime mode and number of real tokens")
    why = [(row["mode"], row["reason"], row["count"]) for row in facts["reasons"]]
    return ReportSection(
        "Dispatch",
        [by_size, Table(why, columns("mode", "reason", "steps", reason="text"), "Why")],
        id="dispatch",
    )


def _padding(facts: Facts) -> ReportSection:
    counts = ("mode", "num_tokens", "steps", "rows", "wasted")
    rows = [(*(row[count] for count in counts), f"{row['share']:.1%}") for row in facts["padding"]]
    heads = columns("mode", "tokens", "steps", "rows", "wasted", "share")
    nothing = "No step was padded: none ran in a graph."
    return ReportSection("Padding", [Table(rows, heads, empty=nothing)], id="padding")
