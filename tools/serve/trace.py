"""Reads request traces in the form of the Azure LLM inference traces.

A CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens, one request a row, in the
order of arrival. An excerpt ships with the package (data/ATTRIBUTION.md).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path

from ...errors import TraceUnreadable

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
EXCERPT = Path(__file__).parent / "data" / "azure_conv_excerpt.csv"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: `arrival` in seconds after the first row, lengths in tokens (at least 1)."""

    arrival: float
    num_prompt: int
    num_generate: int


def read_trace(
    path: Path, *, limit: int | None = None, length_scale: float = 1.0
) -> list[TraceRow]:
    """The first `limit` requests, or all; their lengths times `length_scale`, rounded up.

    Raises TraceUnreadable when there is no such text file, when it holds fewer than `limit`
    requests, or with the line for what is not a trace.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows = list(_rows(path, lines, limit, length_scale))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceUnreadable(path=path, reason=reason) from error
    if len(rows) < (limit or 1):
        reason = f"it holds {len(rows)} of the {limit or 'expected'} requests"
        raise TraceUnreadable(path=path, reason=reason)
    return rows


def _rows(
    path: Path, lines: Iterator[str], limit: int | None, length_scale: float
) -> Iterator[TraceRow]:
    reader = csv.reader(lines)
    header = tuple(name.strip() for name in next(reader, []))
    if header != COLUMNS:
        raise _malformed(path, 1, f"the header is not {','.join(COLUMNS)}")
    first: datetime | None = None
    previous = 0.0
    for cells in islice(filter(None, reader), limit):
        malformed = partial(_malformed, path, reader.line_num)
        if len(cells) != len(COLUMNS):
            raise malformed(f"it has {len(cells)} cells, not {len(COLUMNS)}")
        time = _time(cells[0], malformed)
        first = first or time
        arrival = (time - first).total_seconds()
        if arrival < previous:
            raise malformed("it arrives before the row above it")
        previous = arrival
        prompt = _length(COLUMNS[1], cells[1], malformed)
        generate = _length(COLUMNS[2], cells[2], malformed)
        yield TraceRow(arrival, _scaled(prompt, length_scale), _scaled(generate, length_scale))


def _malformed(path: Path, line: int, reason: str) -> TraceUnreadable:
    return TraceUnreadable(path=path, reason=f"line {line}: {reason}")


def _time(cell: str, malformed: Callable[[str], TraceUnreadable]) -> datetime:
    """The time without its zone; all rows of a trace are taken to be in the same one."""
    try:
        return datetime.fromisoformat(cell.strip()).replace(tzinfo=None)
    except ValueError:
        raise malformed(f"{cell!r} is not a time") from None


def _length(name: str, cell: str, malformed: Callable[[str], TraceUnreadable]) -> int:
    text = cell.strip()
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise malformed(f"{name} {cell[:20]!r} is not a positive number of tokens")
    return int(text)


def _scaled(length: int, scale: float) -> int:
    return max(1, math.ceil(length * scale))
