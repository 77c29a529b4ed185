"""The split graph as SVG: the steps in a column, values as lines between them.

A value that the next step takes goes straight down. A value that later steps take runs down a
column on the right, which no other value uses from its creation to its last use; its shape is
written where the column begins. The middle of a long chain is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Facts = dict[str, Any]

WIDTH, HEIGHT, GAP = 300, 34, 46
LEFT, FIRST_COLUMN, COLUMN, LABELS = 20, 170, 14, 260
HEAD, TAIL = 14, 9
"""Steps shown at the beginning and at the end of a chain that is too long to show."""

COLORS = 8
FOLD_FROM = 3
"""The number of equal repetitions from which they are folded."""

SHAPES = 5
"""Shapes written beside one step at most."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A value, the row that makes it and the rows further down that take it."""

    name: str
    shape: str
    start: int
    stops: tuple[int, ...]


def picture(steps: Sequence[Facts]) -> str:
    """An `<svg>` element; its classes are styled by the page."""
    shown, left_out = _shortened(steps)
    values = _values(shown)
    columns = _columns([value for value in values if value.stops[-1] > value.start + 1])
    labels = LEFT + WIDTH + FIRST_COLUMN + COLUMN * (max(columns.values(), default=-1) + 1)
    width, height = labels + LABELS, len(shown) * (HEIGHT + GAP)
    rows = range(len(shown))
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        f' aria-label="Split graph: {len(steps)} steps, {left_out} of them not shown">',
        *(_straight(row, [value for value in values if value.start == row]) for row in rows),
        *(_column(value, column) for value, column in columns.items()),
        *(_shapes(row, [value for value in columns if value.start == row], labels) for row in rows),
        *(_box(row, step) for row, step in enumerate(shown)),
        "</svg>",
    ]
    return "".join(parts)


def _folded(steps: Sequence[Facts]) -> tuple[list[Facts], int]:
    """The steps, with only the first and the last turn of the longest repetition.

    Equal layers are such a repetition: the same pieces and ops several times.
    """
    kinds = [step.get("op", step.get("piece", step.get("outer"))) for step in steps]
    best = (0, 0, 0)
    for period in range(1, len(kinds) // FOLD_FROM + 1):
        length = 0
        for index in range(period, len(kinds) + 1):
            if index < len(kinds) and kinds[index] == kinds[index - period]:
                length += 1
                continue
            turns = length // period + 1
            if turns >= FOLD_FROM and length > best[0]:
                best = (length, index - length - period, period)
            length = 0
    length, start, period = best
    turns = length // period + 1 if period else 0
    hidden = period * (turns - 2)
    if not hidden or len(steps) <= HEAD:
        return list(steps), 0
    first, last = start + period, start + period * (turns - 1)
    label = f"the {period} steps above {turns - 2} more times"
    gap = {"gap": label, "takes": {}, "gives": {}}
    return [*steps[:first], gap, *steps[last:]], hidden


def _shortened(steps: Sequence[Facts]) -> tuple[list[Facts], int]:
    """At most HEAD + TAIL steps and a placeholder for the others."""
    steps, hidden = _folded(steps)
    if len(steps) <= HEAD + TAIL + 1:
        return list(steps), hidden
    middle = steps[HEAD:-TAIL]
    gap = {"gap": f"{len(middle)} more steps", "takes": {}, "gives": {}}
    return [*steps[:HEAD], gap, *steps[-TAIL:]], len(middle) + hidden


def _values(steps: Sequence[Facts]) -> list[_Value]:
    """Every value that is made and taken among `steps`, in the order in which they are made."""
    takers: dict[str, list[int]] = {}
    for row, step in enumerate(steps):
        for name in step["takes"]:
            takers.setdefault(name, []).append(row)
    return [
        _Value(name, shape, row, tuple(takers[name]))
        for row, step in enumerate(steps)
        for name, shape in step["gives"].items()
        if name in takers
    ]


def _columns(values: Sequence[_Value]) -> dict[_Value, int]:
    """For each value, the first column that is free for its whole lifetime."""
    busy: list[int] = []
    columns: dict[_Value, int] = {}
    for value in values:
        free = (column for column, until in enumerate(busy) if until <= value.start)
        column = next(free, len(busy))
        busy[column : column + 1] = [value.stops[-1]]
        columns[value] = column
    return columns


def _top(row: int) -> int:
    return row * (HEIGHT + GAP) + 2


def _box(row: int, step: Facts) -> str:
    place = f'x="{LEFT}" y="{_top(row)}" width="{WIDTH}" height="{HEIGHT}"'
    if "gap" in step:
        return _centred(row, f"… {step['gap']} …", "gap")
    if "outer" in step:
        return f'<rect {place} class="outer"/>' + _centred(row, step["outer"], "label")
    if "op" in step:
        name = step["op"].removesuffix(".default")
        return f'<rect {place} rx="17" class="op"/>' + _centred(row, name, "label")
    index = step["piece"]
    shape = f'<rect {place} rx="4" class="piece c{index % COLORS}"/>'
    return f'<a href="#piece-{index}">{shape}{_centred(row, f"piece {index}", "label")}</a>'


def _straight(row: int, values: Sequence[_Value]) -> str:
    """One line to the next row for all values it takes, with their shapes beside it."""
    near = [value for value in values if value.stops[0] == row + 1]
    if not near:
        return ""
    x, top, end = LEFT + WIDTH // 2, _top(row) + HEIGHT, _top(row + 1)
    line = f'<path class="edge" d="M{x} {top} V{end - 2}"/>'
    head = f'<path class="head" d="M{x - 4} {end - 7} h8 l-4 6 z"/>'
    shapes = list(dict.fromkeys(value.shape for value in near))
    shown = [*shapes[:2], *(["…"] if len(shapes) > 2 else [])]
    labels = (_text(x + 10, top + 15 + 13 * n, shape, "shape") for n, shape in enumerate(shown))
    return line + head + "".join(labels)


def _column(value: _Value, column: int) -> str:
    """Down the column, and back to each step further down than the next that takes the value."""
    x = LEFT + WIDTH
    bend, start = x + FIRST_COLUMN + COLUMN * column, _top(value.start) + HEIGHT - 8
    far = [stop for stop in value.stops if stop > value.start + 1]
    trunk = f'<path class="edge" d="M{x} {start} H{bend} V{_top(far[-1]) + 8}"/>'
    branches = "".join(
        f'<path class="edge" d="M{bend} {_top(stop) + 8} H{x + 6}"/>'
        f'<path class="head" d="M{x + 7} {_top(stop) + 4} v8 l-6 -4 z"/>'
        for stop in far
    )
    return f"<g><title>{escape(value.name)}: {escape(value.shape)}</title>{trunk}{branches}</g>"


def _shapes(row: int, values: Sequence[_Value], x: int) -> str:
    """The shapes of the values whose columns begin here, from left to right."""
    texts = [f"{value.name}: {value.shape}" for value in values]
    if len(texts) > SHAPES:
        texts = [*texts[: SHAPES - 1], f"… {len(texts) - SHAPES + 1} more"]
    return "".join(_text(x, _top(row) + 12 + 13 * n, text, "shape") for n, text in enumerate(texts))


def _centred(row: int, text: str, kind: str) -> str:
    return _text(LEFT + WIDTH // 2, _top(row) + 22, text, kind)


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'
