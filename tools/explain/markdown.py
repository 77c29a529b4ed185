"""The facts as Markdown, for issues and chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..report.tables import size

Facts = dict[str, Any]


def markdown(facts: Facts) -> str:
    """The page's sections as tables; the picture and the sources are left out."""
    parts = [
        "# piecegraph: startup and run explained",
        _section("Warnings", ("what", "what to do"), _advice(facts)),
        _section(
            "Startup",
            ("phase", "seconds"),
            ((p["name"], f"{p['seconds']:.3f}") for p in facts["startup"]["phases"]),
        ),
        _section(
            "Pieces",
            ("piece", "digest", "nodes", "uses", "made", "seconds", "kernels"),
            (
                (
                    p["piece"],
                    p["digest"][:12],
                    p["nodes"],
                    len(p["used_by"]),
                    p["made"],
                    p["seconds"] and f"{p['seconds']:.2f}",
                    p["kernels"],
                )
                for p in facts["pieces"]
            ),
        ),
        _section(
            "Guards",
            ("guard", "where", "proved", "by"),
            ((g["expression"], g["where"], g["proved"], g["method"]) for g in facts["guards"]),
        ),
        _section(
            f"Graph mode: {facts['graph_mode']['resolved']}",
            ("why",),
            ((reason,) for reason in facts["graph_mode"]["reasons"]),
        ),
        _section(
            "Capture plan",
            ("mode", "tokens", "ms", "memory", "segments", "steps"),
            (
                (
                    c["mode"],
                    c["num_tokens"],
                    c["ms"] and f"{c['ms']:.1f}",
                    size(c["bytes"]),
                    c["segments"],
                    c["steps"],
                )
                for c in facts["captures"]
            ),
        ),
        _section(
            "Dispatch: steps by size",
            ("mode", *facts["heat"]["columns"]),
            ((row["mode"], *row["counts"]) for row in facts["heat"]["rows"]),
        ),
        _section(
            "Padding",
            ("mode", "tokens", "steps", "share"),
            (
                (p["mode"], p["num_tokens"], p["steps"], f"{p['share']:.1%}")
                for p in facts["padding"]
            ),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _advice(facts: Facts) -> Iterable[Sequence[Any]]:
    return ((advice["what"], advice["todo"]) for advice in facts["advice"])


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [_row(columns), _row(["---"] * len(columns)), *map(_row, rows)]
    body = "\n".join(lines) if len(lines) > 2 else "none"
    return f"## {title}\n\n{body}"


def _row(cells: Sequence[Any]) -> str:
    shown = ("-" if cell is None else str(cell).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(shown)} |"
