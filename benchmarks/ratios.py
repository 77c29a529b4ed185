"""The result of a comparison as tables: what was measured, and the ratios."""

from __future__ import annotations

from typing import Any

from piecegraph.tools.report.sections import ReportSection, Table, columns

WIDE = 8
"""A table with more columns than this does not fit into the width of a terminal."""


def ratios_section(name: str, result: dict[str, Any]) -> ReportSection:
    """What a benchmark measured, if anything, and the ratios that sum it up.

    Of `rows` those `columns` are shown, by default all, that hold something. A table of many
    columns is shown transposed.
    """
    tables, rows = [], result["rows"]
    if rows:
        wanted = result.get("columns", rows[0])
        filled = [column for column in wanted if any(row[column] is not None for row in rows)]
        cells = [[_short(row[column]) for column in filled] for row in rows]
        heads = [column.replace("_", " ") for column in filled]
        if len(heads) > WIDE:
            heads, *cells = map(list, zip(heads, *cells, strict=True))
        title = f"{name}: {result['note']}" if "note" in result else name
        tables.append(Table(cells, columns(*heads), title))
    heads = ["medians of paired runs", "ratio"]
    ratios: list[tuple[Any, ...]] = [
        (ratio, _short(value)) for ratio, value in result["ratios"].items()
    ]
    if quartiles := result.get("quartiles"):
        heads.append("middle half")
        spread = [" to ".join(map(_short, quartiles.get(name, ()))) for name, _ in ratios]
        ratios = [(*row, shown) for row, shown in zip(ratios, spread, strict=True)]
    tables.append(Table(ratios, columns(*heads), "Ratios"))
    return ReportSection(name, tables)


def _short(cell: Any) -> Any:
    """A number to three significant digits."""
    return f"{float(f'{cell:.3g}'):g}" if isinstance(cell, float) else cell
