"""Sections of a report: built once, shown on a terminal, as Markdown or on a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class Column:
    """A column of text, code, number, bar or heat.

    A bar is (start, width) and a heat (text, strength), as shares of 1.

    Only a page draws bars; a terminal and Markdown show the text of a heat.
    """

    name: str
    kind: str = "number"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns; without columns, facts by name. `ids` are anchors of rows on a page."""

    rows: Sequence[Sequence[Any]]
    columns: Sequence[Column] = ()
    caption: str = ""
    ids: Sequence[str] = ()
    empty: str = "None."

    def as_text(self) -> tuple[list[str], list[list[Any]]]:
        """Names of columns and cells of rows, without the bars."""
        shown = [i for i, column in enumerate(self.columns) if column.kind != "bar"]
        rows = [[_plain(row[i]) for i in shown] for row in self.rows]
        return [self.columns[i].name for i in shown], rows


@dataclass(frozen=True, slots=True)
class ReportSection:
    """One subject. `details` are long texts by summary and `picture` is SVG, for a page only."""

    title: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    id: str = ""
    style: str = ""
    details: Sequence[tuple[str, str]] = field(default=())
    picture: str = ""
    is_open: bool = True


def columns(*names: str, **kinds: str) -> tuple[Column, ...]:
    """Columns of numbers but for the first, of text; `kinds` lists the exceptions, by name."""
    return tuple(
        Column(name, kinds.get(name.replace(" ", "_"), "number" if index else "text"))
        for index, name in enumerate(names)
    )


def as_terminal(section: ReportSection) -> Iterator[RenderableType]:
    """The section's tables and notes for a console of rich."""
    from rich.table import Table as RichTable
    from rich.text import Text

    for table in section.tables:
        if table.columns:
            yield rich_table(table.caption or section.title, *table.as_text())
        else:
            grid = RichTable.grid(padding=(0, 2))
            grid.add_column(style="bold", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, fact in table.rows:
                grid.add_row(name, Text(fact))
            yield grid
    for note in section.notes:
        yield Text(note, style=section.style)


def as_markdown(section: ReportSection) -> str:
    """The section as Markdown; pictures and details are left out."""
    parts = [f"## {section.title}", *section.notes]
    for table in section.tables:
        names, rows = table.as_text()
        lines = map(_markdown_row, (names, ["---"] * len(names), *rows))
        body = "\n".join(lines) if table.rows else "none"
        parts.append(f"{table.caption}:\n\n{body}" if table.caption else body)
    return "\n\n".join(parts)


def _markdown_row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _plain(cell: Any) -> Any:
    """A cell as text: of a heat its text, a dash for nothing."""
    cell = cell[0] if isinstance(cell, tuple) else cell
    return "-" if cell is None else cell


def rich_table(title: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> RichTable:
    """A table whose first column is text and whose others are numbers."""
    from rich.table import Table as RichTable
    from rich.text import Text

    result = RichTable(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(names):
        longest = max(map(len, name.split()), default=0)
        result.add_column(
            name, justify="right" if i else "left", overflow="fold", min_width=longest
        )
    for row in rows:
        result.add_row(*(Text(str(cell)) for cell in row))
    return result


def size(num_bytes: int) -> str:
    """Bytes with a binary unit."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{num_bytes} B"
