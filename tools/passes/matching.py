"""Structural matching of graph values: small patterns, matched from their last value backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Op:
    """A call of `target` whose arguments match `args`; with `swap`, in either order."""

    target: Any
    args: tuple[Any, ...]
    swap: bool = False


@dataclass(frozen=True, slots=True)
class Either:
    """A value that matches one of the alternatives; the first match counts."""

    alternatives: tuple[Any, ...]


def match(pattern: Any, value: Any) -> Found | None:
    """The values bound to the names in `pattern`, or None without a match.

    A string names a value; the same name must match the same value. `Op` and `Either` match as
    documented; anything else is a constant. A call with keyword arguments matches no `Op`.
    """
    return _match(pattern, value, {})


def _match(pattern: Any, value: Any, found: Found) -> Found | None:
    match pattern:
        case str():
            if pattern in found:
                return found if found[pattern] is value else None
            return {**found, pattern: value}
        case Either():
            tries = (_match(each, value, found) for each in pattern.alternatives)
            return next((matched for matched in tries if matched is not None), None)
        case Op():
            return _match_op(pattern, value, found)
    return found if not isinstance(value, Node) and pattern == value else None


def _match_op(pattern: Op, value: Any, found: Found) -> Found | None:
    if not isinstance(value, Node) or value.target is not pattern.target or value.kwargs:
        return None
    if len(value.args) != len(pattern.args):
        return None
    orders = [pattern.args, (pattern.args[1], pattern.args[0])] if pattern.swap else [pattern.args]
    for order in orders:
        matched: Found | None = found
        for each, argument in zip(order, value.args, strict=True):
            if matched is not None:
                matched = _match(each, argument, matched)
        if matched is not None:
            return matched
    return None
