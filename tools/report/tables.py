"""Tables and units for reports that people read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

WIDE = 8
"""More columns than this do not fit into the width of a terminal."""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    result = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        longest = max(map(len, column.split()), default=0)
        side: JustifyMethod = "right" if i else "left"
        result.add_column(column, justify=side, overflow="fold", min_width=longest)
    for row in rows:
        result.add_row(*(Text(str(cell)) for cell in row))
    return result


def benchmark_tables(name: str, result: dict[str, Any]) -> Iterator[Table]:
    """What was measured, if anything was, and the ratios that sum it up.

    Of `rows` those `columns` are shown, by default all, in which there is something; few rows of
    many columns are shown on their side.
    """
    rows = result["rows"]
    if rows:
        wanted = result.get("columns", rows[0])
        columns = [column for column in wanted if any(row[column] is not None for row in rows)]
        cells = [[_short(row[column]) for column in columns] for row in rows]
        heads = [column.replace("_", " ") for column in columns]
        if len(heads) > WIDE:
            heads, *cells = map(list, zip(heads, *cells, strict=True))
        title = f"{name}: {result['note']}" if "note" in result else name
        yield table(title, heads, cells)
    ratios = [(ratio, _short(value)) for ratio, value in result["ratios"].items()]
    yield table("Ratios", ("medians of paired runs", "ratio"), ratios)


def _short(cell: Any) -> Any:
    """Three significant digits of a number, a dash for nothing."""
    if cell is None:
        return "-"
    return f"{float(f'{cell:.3g}'):g}" if isinstance(cell, float) else cell


def size(num_bytes: int) -> str:
    """Bytes with a binary unit."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{num_bytes} B"
