"""Buckets from a file: one `(batch, query, context)` a line, each an int, a list or a range."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from ...errors import BucketFileInvalid
from .bucket import Bucket

MOST_VALUES, MOST_BUCKETS = 10_000, 100_000
"""The most values of an element, and the most buckets of a line."""

LEAST = Bucket(1, 1, 0)
"""The least value of each element."""


class BadLine(NamedTuple):
    """An invalid line and the place of its error, both counted from 1."""

    line: int
    column: int
    reason: str


def read_buckets(text: str, *, source: str = "buckets") -> tuple[Bucket, ...]:
    """The buckets of all lines of `text`, ascending and distinct.

    An element is an int, a list of ints, or `range(start, stop[, step])`, `stop` excluded; a line
    means all combinations, as `(range(1, 5), [128, 256], 0)`. A query of 1 makes a decode bucket.
    Blank lines and comments after `#` are skipped. Raises BucketFileInvalid with the place and the
    reason of the error in each invalid line, after the name `source`.
    """
    buckets: set[Bucket] = set()
    bad: list[BadLine] = []
    for number, line in enumerate(text.split("\n"), 1):
        code = line.lstrip()
        if not code or code.startswith("#"):
            continue
        try:
            buckets.update(map(Bucket, *zip(*product(*_elements(code)), strict=True)))
        except _InvalidElement as invalid:
            column = len(line) - len(code) + invalid.column
            bad.append(BadLine(number, column, invalid.reason))
    if bad:
        listed = "; ".join(f"{source}:{each.line}:{each.column}: {each.reason}" for each in bad)
        raise BucketFileInvalid(lines=bad, listed=listed)
    return tuple(sorted(buckets))


class _InvalidElement(Exception):
    """The first error in one line, and where it begins."""

    def __init__(self, reason: str, column: int = 1) -> None:
        self.reason = reason
        self.column = column


def _elements(code: str) -> list[Sequence[int]]:
    try:
        parsed = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = getattr(error, "offset", None) or 1
        raise _InvalidElement(f"it is no tuple: {error.args[0]}", column) from None
    if not isinstance(parsed, ast.Tuple) or len(parsed.elts) != len(LEAST):
        raise _InvalidElement("it is not (batch, query, context)")
    elements = [_values(element) for element in parsed.elts]
    for name, least, values, element in zip(
        LEAST._fields, LEAST, elements, parsed.elts, strict=True
    ):
        if (smallest := min(values)) < least:
            raise _InvalidElement(f"{name} {smallest} is below {least}", element.col_offset + 1)
    if (number := prod(map(len, elements))) > MOST_BUCKETS:
        raise _InvalidElement(f"it means {number} buckets, more than {MOST_BUCKETS}")
    return elements


def _values(element: ast.expr) -> Sequence[int]:
    if isinstance(element, ast.Call) and ast.unparse(element.func) == "range":
        values: Sequence[int] = _range(element)
    else:
        each = element.elts if isinstance(element, ast.List) else [element]
        values = [_integer(item) for item in each]
    if not values or values[MOST_VALUES:]:
        reason = f"{ast.unparse(element)} does not have 1 to {MOST_VALUES} values"
        raise _InvalidElement(reason, element.col_offset + 1)
    return values


def _range(call: ast.Call) -> range:
    bounds = [_integer(each) for each in call.args]
    if call.keywords or len(bounds) not in (2, 3) or bounds[2:] == [0]:
        reason = f"{ast.unparse(call)} is not range(start, stop[, step]) with a step other than 0"
        raise _InvalidElement(reason, call.col_offset + 1)
    return range(*bounds)


def _integer(element: ast.expr) -> int:
    try:
        value = ast.literal_eval(element)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        value = None
    if type(value) is not int:
        reason = f"{ast.unparse(element)} is no int, list of ints or range"
        raise _InvalidElement(reason, element.col_offset + 1)
    return value
