"""What graphs of a model that is not traced hold of it, besides its weights.

That is all that its Python can read of it: modules, also those in lists and dicts, and their
classes, hooks, flags and plain attributes, and those of dataclasses such as a configuration. Of
other objects what was read inside graphs is compared, see `exchanged`; modules that they hold are
as those of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import Any
from weakref import ref

from torch import nn

from ....compile.conditions.conditions import BrokenCondition
from ....compile.conditions.places import CONTAINERS, MISSING
from ....torch_compat.basics.modules import global_forward_hooks, place_of
from ....torch_compat.basics.tensors import has_plain_memory, inner_tensors

_PLAIN = (bool, int, float, complex, str, bytes, type, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
Steps = tuple[Any, ...]
"""From a model to what it holds; see `conditions.places`."""

LONG = 1000
"""Items of a container of which only the identity and the length are compared."""


class ModuleState:
    """The state of `model` at the time of the call; `changes` are those of other objects."""

    def __init__(
        self, model: nn.Module, changes: Callable[[], Iterable[tuple[str, str, str] | None]]
    ) -> None:
        self._model = model
        self._changes = changes
        self._reached: dict[str, nn.Module] = {}
        self._then = dict(_state(model, {}))

    def reach(self, modules: Mapping[str, nn.Module]) -> None:
        """Compare other modules, too: by how each is written."""
        self._reached = {**modules, **self._reached}
        for place, now in _state(self._model, self._reached):
            self._then.setdefault(place, now)

    def checked(self) -> Iterator[BrokenCondition | None]:
        """Yields what is different now, and None after each module."""
        left = dict(self._then)
        for place, (kind, now) in _state(self._model, self._reached):
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
    """An object by its identity, without keeping it alive where Python allows that. A tensor also
    by its place."""

    def __init__(self, value: Any) -> None:
        held = inner_tensors(value) if has_plain_memory(value) else ()
        self._places = [*map(place_of, held)]
        self._text = getattr(value, "__name__", type(value).__name__)
        try:
            self._value: Any = ref(value)
        except TypeError:
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Object) or (value := self._value()) is None:
            return False
        return other._value() is value and other._places == self._places

    def __repr__(self) -> str:
        at = ", ".join(hex(place[0]) for place in self._places)
        return f"{self._text} at {at}" if at else str(self._text)


def _state(
    model: nn.Module, reached: Mapping[str, nn.Module]
) -> Iterator[tuple[str, tuple[type, dict[str, Any]]]]:
    """The place, class and attributes of each module and dataclass; the values do not change."""
    hooks = {"hooks": _frozen(global_forward_hooks())}
    yield "all modules", (nn.Module, hooks)
    for path, _, holder, attributes in _holders(model, reached):
        yield path, (type(holder), {name: _frozen(value) for name, value in attributes.items()})


def held_modules(model: nn.Module) -> Iterator[tuple[str, Steps, nn.Module]]:
    """Modules that a list, a dict or another container of a model holds, which are none of its
    submodules: how each is written, and the steps to it."""
    submodules = set(map(id, model.modules()))
    for path, steps, holder, _ in _holders(model):
        if isinstance(holder, nn.Module) and id(holder) not in submodules:
            yield path.removeprefix("model."), steps, holder


def _holders(
    model: nn.Module, reached: Mapping[str, nn.Module] = MappingProxyType({})
) -> Iterator[tuple[str, Steps, Any, dict[str, Any]]]:
    """Each module and dataclass once, with its other attributes: how it is written, by its
    attributes if there are some, and the steps to it."""
    queue: list[tuple[str, Steps, Any]] = [("model", (), model)]
    held: list[tuple[str, Steps, Any]] = [(path, (), each) for path, each in reached.items()]
    seen: set[int] = set()
    while queue or held:
        path, steps, holder = (queue or held).pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        attributes: dict[str, Any] = {}
        for name, value in list(vars(holder).items()):
            if name == "_modules":
                submodules = ((key, each) for key, each in value.items() if each is not None)
                queue += [(f"{path}.{key}", (*steps, key), each) for key, each in submodules]
            elif isinstance(value, nn.Module) or _is_data(value):
                queue.append((f"{path}.{name}", (*steps, name), value))
            elif name in CONTAINERS:
                attributes[name] = [key for key, each in value.items() if each is not None]
            else:
                attributes[name] = value
                held += modules_in(value, f"{path}.{name}", (*steps, name))
        yield path, steps, holder, attributes


def modules_in(value: Any, path: str, steps: Steps) -> Iterator[tuple[str, Steps, nn.Module]]:
    """The modules in a container, at any depth, and those of a method."""
    if isinstance(value, nn.Module):
        yield path, steps, value
    elif isinstance(value, MethodType):
        yield from modules_in(value.__self__, f"{path}.__self__", (*steps, "__self__"))
    elif isinstance(value, partial):
        for name in ("func", "args", "keywords"):
            yield from modules_in(getattr(value, name), f"{path}.{name}", (*steps, name))
    elif isinstance(value, _CONTAINERS) and len(value) <= LONG:
        is_set = isinstance(value, (set, frozenset))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            if type(each) not in _PLAIN:
                step = ["key" if is_set else "item", key]
                yield from modules_in(each, f"{path}[{key!r}]", (*steps, step))


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
    if not isinstance(value, _CONTAINERS):
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
