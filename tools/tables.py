"""Tables and units for reports that people read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    result = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        result.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in rows:
        result.add_row(*(Text(str(cell)) for cell in row))
    return result


def benchmark_tables(name: str, result: dict[str, Any]) -> Iterator[Table]:
    """What was measured, if anything was, and the ratios that sum it up."""
    rows = result["rows"]
    if rows:
        columns = [column.replace("_", " ") for column in rows[0]]
        yield table(name, columns, [[_short(cell) for cell in row.values()] for row in rows])
    ratios = [(ratio, _short(value)) for ratio, value in result["ratios"].items()]
    yield table("Ratios", ("medians of paired runs", "ratio"), ratios)


def _short(cell: Any) -> Any:
    return f"{cell:.4g}" if isinstance(cell, float) else cell


def size(num_bytes: int) -> str:
    """Bytes with a binary unit."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{num_bytes} B"
