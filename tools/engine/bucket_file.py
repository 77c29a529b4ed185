"""Buckets from a file: one `(batch, query, context)` a line, each an int, a list or a range."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from ...dispatch import Bucket
from ...errors import BucketFileInvalid

MOST_VALUES = 10_000
"""The most values of one range."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """An invalid line; `number` counts from 1."""

    number: int
    reason: str


def read_buckets(lines: Iterable[str], *, source: str = "the bucket file") -> tuple[Bucket, ...]:
    """The buckets of all lines, ascending and distinct; a line means all its combinations.

    An element is an int, a list of ints, or `range(start, stop[, step])`, stop excluded. A query
    of 1 makes a decode bucket. Blank lines and comments (`#` to the end of the line) are skipped.
    Raises BucketFileInvalid with the number and the error of every invalid line.
    """
    buckets: set[Bucket] = set()
    bad: list[BadLine] = []
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        try:
            buckets.update(Bucket(*values) for values in product(*_elements(text)))
        except _Unreadable as unreadable:
            bad.append(BadLine(number, str(unreadable)))
    if bad:
        listed = "; ".join(f"line {each.number}: {each.reason}" for each in bad)
        raise BucketFileInvalid(source=source, lines=bad, listed=listed)
    return tuple(sorted(buckets))


class _Unreadable(Exception):
    """The error in one line."""


def _elements(text: str) -> list[list[int]]:
    try:
        parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _Unreadable(f"{text!r} is not a tuple") from error
    if not isinstance(parsed, ast.Tuple) or len(parsed.elts) != 3:
        raise _Unreadable(f"{text!r} is not (batch, query, context)")
    batch, query, context = map(_values, parsed.elts)
    for name, values, least in (("batch", batch, 1), ("query", query, 1), ("context", context, 0)):
        if below := [value for value in values if value < least]:
            raise _Unreadable(f"{name} {below[0]} is below {least}")
    return [batch, query, context]


def _values(element: ast.expr) -> list[int]:
    if isinstance(element, ast.List):
        return [_integer(each) for each in element.elts]
    if not (isinstance(element, ast.Call) and ast.unparse(element.func) == "range"):
        return [_integer(element)]
    arguments = [_integer(each) for each in element.args]
    if element.keywords or len(arguments) not in (2, 3):
        raise _Unreadable(f"{ast.unparse(element)} is not range(start, stop[, step])")
    if arguments[2:] == [0]:
        raise _Unreadable(f"{ast.unparse(element)} has a step of 0")
    values = range(*arguments)
    if not 0 < len(values) <= MOST_VALUES:
        raise _Unreadable(
            f"{ast.unparse(element)} has {len(values)} values, not 1 to {MOST_VALUES}"
        )
    return list(values)


def _integer(element: ast.expr) -> int:
    try:
        value = ast.literal_eval(element)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise _Unreadable(f"{ast.unparse(element)} is not an int, a list or a range") from error
    if not isinstance(value, int) or isinstance(value, bool):
        raise _Unreadable(f"{value!r} is not an int")
    return value
