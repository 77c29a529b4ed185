"""What a public method is given is checked when it is given, by the method's annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from math import inf
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from ...errors import InvalidArgument

_NUMBERS = {int: Integral, float: Real}

P = ParamSpec("P")
R = TypeVar("R")


def checked(method: Callable[P, R]) -> Callable[P, R]:
    """`method`, which raises InvalidArgument for an argument that it does not state."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = get_type_hints(method)
        for name, value in (
            inspect.signature(method).bind_partial(*args, **kwargs).arguments.items()
        ):
            if not _fits(value, hints.get(name, Any)):
                expected = method.__annotations__[name]
                raise InvalidArgument(
                    call=method.__name__, name=name, value=repr(value), expected=expected
                )
        return method(*args, **kwargs)

    return call


def must_be_within(call: str, name: str, value: float, high: float = inf) -> None:
    """Raise InvalidArgument unless a number is from 0 to `high`."""
    if not 0 <= value <= high:
        expected = "a number from 0 on" if high == inf else f"a number from 0 to {high:g}"
        raise InvalidArgument(call=call, name=name, value=repr(value), expected=expected)


def _fits(value: Any, kind: Any) -> bool:
    origin, given = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in given)
    if origin is Literal:
        return isinstance(value, str) and value in given
    if origin is Sequence and isinstance(value, Sequence):
        return all(_fits(each, given[0]) for each in value)
    if getattr(kind, "_is_protocol", False) or origin is Callable:
        return callable(value)
    kind = _NUMBERS.get(kind, origin or kind)
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)
