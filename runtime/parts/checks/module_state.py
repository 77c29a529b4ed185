"""What graphs of a model that is not traced hold of it, besides its weights.

That is all that its Python can read of it: modules and their classes, hooks, flags and plain
attributes, and those of dataclasses such as a configuration. Of other objects what was read inside
graphs is compared: see `exchanged`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

from torch import nn

from ....compile.conditions.conditions import BrokenCondition
from ....compile.conditions.places import CONTAINERS, MISSING
from ....torch_compat.basics.modules import global_forward_hooks

_PLAIN = (bool, int, float, complex, str, bytes, type, type(None))
LONG = 1000
"""Items of a container of which only the identity and the length are compared."""


class ModuleState:
    """The state of `model` at the time of the call; `changes` are those of other objects."""

    def __init__(
        self, model: nn.Module, changes: Callable[[], Iterable[tuple[str, str, str] | None]]
    ) -> None:
        self._model = model
        self._changes = changes
        self._then = dict(_state(model))

    def checked(self) -> Iterator[BrokenCondition | None]:
        """Yields what is different now, and None after each module."""
        left = dict(self._then)
        for place, (kind, now) in _state(self._model):
            was, then = left.pop(place, (None, {}))
            if kind is not was:
                yield BrokenCondition(place, _shown(was), _shown(kind))
                continue
            for name in {**then, **now}:
                old, new = then.get(name, MISSING), now.get(name, MISSING)
                if old is not new and old != new:
                    yield BrokenCondition(f"{place}.{name}", _shown(old), _shown(new))
            yield None
        for place, (kind, _) in left.items():
            yield BrokenCondition(place, _shown(kind), _shown(None))
        for change in self._changes():
            yield change and BrokenCondition(*change)


class _Object:
    """An object by its identity, without keeping it alive where Python allows that."""

    def __init__(self, value: Any) -> None:
        self._text = getattr(value, "__name__", type(value).__name__)
        try:
            self._value: Any = ref(value)
        except TypeError:
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Object) or (value := self._value()) is None:
            return False
        return other._value() is value

    def __repr__(self) -> str:
        return str(self._text)


def _state(model: nn.Module) -> Iterator[tuple[str, tuple[type, dict[str, Any]]]]:
    """The place, class and attributes of each module and dataclass; the values do not change."""
    hooks = {"hooks": _frozen(global_forward_hooks())}
    yield "all modules", (nn.Module, hooks)
    queue: list[tuple[str, Any]] = [("model", model)]
    seen: set[int] = set()
    while queue:
        path, holder = queue.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        attributes: dict[str, Any] = {}
        for name, value in list(vars(holder).items()):
            if name == "_modules":
                queue += [(f"{path}.{key}", each) for key, each in value.items()]
            elif isinstance(value, nn.Module) or _is_data(value):
                queue.append((f"{path}.{name}", value))
            elif name not in CONTAINERS:
                attributes[name] = _frozen(value)
        yield path, (type(holder), attributes)


def _is_data(value: Any) -> bool:
    has_fields = is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")
    return has_fields or isinstance(value, SimpleNamespace)


def _frozen(value: Any) -> Any:
    """A value that does not change; a container is a tuple of its class and its items."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bytearray) or hasattr(type(value), "tobytes"):  # of numpy, or an array
        size = getattr(value, "nbytes", None) or len(value)
        content = getattr(value, "tobytes", partial(bytes, value))
        return type(value), _Object(value) if size > LONG else content(), size
    if isinstance(value, partial):
        return type(value), *map(_frozen, (value.func, value.args, value.keywords))
    if not isinstance(value, (list, tuple, dict, set, frozenset, deque)):
        return _Object(value)
    if len(value) > LONG:
        return type(value), _Object(value), len(value)
    items = value.items() if isinstance(value, dict) else value
    if isinstance(value, (set, frozenset)):
        items = sorted(value, key=repr)
    return type(value), *map(_frozen, items)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value[1:]))}]"
    if value is MISSING or value is None:
        return "missing" if value is MISSING else "none"
    text = value.__name__ if isinstance(value, type) else repr(value)
    return text if len(text) < 80 else f"{text[:80]}…"
