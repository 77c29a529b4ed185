"""The split graph as SVG: the steps in a column, values as lines between them.

A value that the next step takes goes straight down; one that skips steps bends around on the right,
in a lane of its own as long as it lives. The middle of a long chain is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Facts = dict[str, Any]

WIDTH, HEIGHT, GAP = 250, 34, 46
LEFT, LANE = 20, 18
HEAD, TAIL = 14, 9
"""Steps shown at the beginning and at the end of a chain too long to be shown whole."""

COLOURS = 8


@dataclass(frozen=True, slots=True)
class _Line:
    """A value on its way from one row to another."""

    name: str
    shape: str
    start: int
    stop: int


def picture(steps: Sequence[Facts]) -> str:
    """An `<svg>` element; its classes are styled by the page."""
    shown, left_out = _shortened(steps)
    lines = _lines(shown)
    lanes = _lanes([line for line in lines if line.stop > line.start + 1])
    width = LEFT + WIDTH + 150 + LANE * (max(lanes.values(), default=-1) + 1) + 170
    height = len(shown) * (HEIGHT + GAP)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        f' aria-label="Split graph: {len(steps)} steps, {left_out} of them not shown">'
    ]
    parts += [_straight(row, [x for x in lines if x.start == row]) for row in range(len(shown))]
    parts += [_bent(line, lane) for line, lane in lanes.items()]
    parts += [_box(row, step) for row, step in enumerate(shown)]
    return "".join([*parts, "</svg>"])


def _shortened(steps: Sequence[Facts]) -> tuple[list[Facts], int]:
    if len(steps) <= HEAD + TAIL + 1:
        return list(steps), 0
    middle = steps[HEAD:-TAIL]
    gap = {"gap": len(middle), "takes": {}, "gives": {}}
    return [*steps[:HEAD], gap, *steps[-TAIL:]], len(middle)


def _lines(steps: Sequence[Facts]) -> list[_Line]:
    """Each value from the row that gives it to each row that takes it."""
    made = {name: row for row, step in enumerate(steps) for name in step["gives"]}
    return [
        _Line(name, steps[made[name]]["gives"][name], made[name], row)
        for row, step in enumerate(steps)
        for name in step["takes"]
        if name in made and made[name] < row
    ]


def _lanes(lines: Sequence[_Line]) -> dict[_Line, int]:
    """The first lane that is free from the line's start to its stop."""
    busy: list[list[_Line]] = []
    lanes: dict[_Line, int] = {}
    for line in sorted(lines, key=lambda line: (line.start, line.stop)):
        free = (
            lane
            for lane, others in enumerate(busy)
            if all(other.stop <= line.start or other.start >= line.stop for other in others)
        )
        lane = next(free, len(busy))
        if lane == len(busy):
            busy.append([])
        busy[lane].append(line)
        lanes[line] = lane
    return lanes


def _top(row: int) -> int:
    return row * (HEIGHT + GAP) + 2


def _box(row: int, step: Facts) -> str:
    place = f'x="{LEFT}" y="{_top(row)}" width="{WIDTH}" height="{HEIGHT}"'
    if "gap" in step:
        return _text(LEFT + WIDTH // 2, _top(row) + 22, f"… {step['gap']} more steps …", "gap")
    if "op" in step:
        label = step["op"]
        shape = f'<rect {place} rx="17" class="op"/>'
        return shape + _text(LEFT + WIDTH // 2, _top(row) + 22, label, "label")
    index = step["piece"]
    shape = f'<rect {place} rx="4" class="piece c{index % COLOURS}"/>'
    text = _text(LEFT + WIDTH // 2, _top(row) + 22, f"piece {index}", "label")
    return f'<a href="#piece-{index}">{shape}{text}</a>'


def _straight(row: int, lines: Sequence[_Line]) -> str:
    """One line to the next row for all values it takes, with their shapes beside it."""
    near = [line for line in lines if line.stop == row + 1]
    if not near:
        return ""
    x, top = LEFT + WIDTH // 2, _top(row) + HEIGHT
    arrow = f'<path class="edge" d="M{x} {top} V{_top(row + 1) - 2}" marker-end="none"/>'
    head = f'<path class="head" d="M{x - 4} {_top(row + 1) - 7} h8 l-4 6 z"/>'
    shapes = list(dict.fromkeys(line.shape for line in near))
    labels = [
        _text(x + 10, top + 15 + 13 * place, shape, "shape")
        for place, shape in enumerate([*shapes[:2], *(["…"] if len(shapes) > 2 else [])])
    ]
    return arrow + head + "".join(labels)


def _bent(line: _Line, lane: int) -> str:
    x = LEFT + WIDTH
    bend = x + 150 + LANE * lane
    start, stop = _top(line.start) + HEIGHT - 8, _top(line.stop) + 8
    path = f'<path class="edge skip" d="M{x} {start} H{bend} V{stop} H{x}"/>'
    head = f'<path class="head" d="M{x + 7} {stop - 4} v8 l-6 -4 z"/>'
    title = f"<title>{escape(line.name)}: {escape(line.shape)}</title>"
    label = _text(bend + 4, start + 12, line.shape, "shape") if line.stop > line.start + 2 else ""
    return f"<g>{title}{path}{head}{label}</g>"


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'
