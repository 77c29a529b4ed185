"""What Python inside graphs and breaks leave for each other on a model that is not traced.

A replay runs the breaks, and no Python of the graphs between them. So attributes of modules that
such Python sets are set again before the next break, and what it reads of attributes that breaks
set is compared. Modules' classes are observed, in a run before the first capture and in each one.
Of dicts, lists and namespaces that both read the content is compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ....compile.ir.locations import user_line
from ....errors import NotReplayed
from ....torch_compat.basics.modules import place_of
from .observer import LEAVES, OF_ANY_MODULE, observe, observe_no_longer

_CONTAINERS = (dict, list, set, deque, SimpleNamespace)
_LONG = 1000
"""Items of a container that is not looked into."""
_Key = tuple[int, Any]
"""The identity of an object, and the name of an attribute; None for its content."""


class BreakAccess:
    """What breaks of a model were seen to read and to set: also on a device, where no break runs
    in a capture."""

    def __init__(self) -> None:
        self.read = set[_Key]()
        self.wrote = set[_Key]()


class Exchanged:
    """Observes one run of a model: Python of a graph after `open`, of a break after `close`."""

    def __init__(self, model: nn.Module, breaks: BreakAccess) -> None:
        named = model.named_modules()
        self._names = {id(each): f"model.{path}".rstrip(".") for path, each in named}
        self._kinds = {type(each) for each in model.modules()}
        self._held: list[Any] = [model]  # identities are unique while the objects live
        self._breaks = breaks
        self._thread = 0
        self._in_graph = False
        self._read, self._set = set[_Key](), set[_Key]()
        self._from_itself = set[_Key]()
        """What graphs read, and then change."""
        self._refused: NotReplayed | None = None
        self._start_graph()

    def _start_graph(self) -> None:
        self._wrote: dict[_Key, Any] = {}
        self._expected: dict[_Key, tuple[Any, Any]] = {}
        self._contents: dict[int, tuple[str, Any, Any]] = {}

    def open(self) -> None:
        if not self._thread:
            self._thread = get_ident()
            for kind in self._kinds:
                observe(kind, self)
        self._start_graph()
        self._in_graph = True

    def close(self) -> None:
        """Raises NotReplayed."""
        self._in_graph = False
        for at, (path, value, then) in self._contents.items():
            if not _same(_content(value), then):
                self._changes_itself((at, None), path)
        if self._refused is not None:
            raise self._refused

    def finish(self) -> None:
        self._thread = 0
        for kind in self._kinds:
            observe_no_longer(kind, self)

    def border(self, weak: Callable[[Any], Any]) -> Callable[[], None] | None:
        """What runs in each step between the break before the graph that was closed and the next:
        it compares what the graph reads of what breaks leave, and sets what the graph sets. Raises
        NotReplayed."""
        names = self._names
        expected = [(obj, key[1], then) for key, (obj, then) in self._expected.items()]
        contents = [each for at, each in self._contents.items() if (at, None) in self._breaks.read]
        thread, self._thread = self._thread, 0
        written = [
            (obj, key[1], weak(getattr(obj, key[1], None)))
            for key, obj in self._wrote.items()
            if key not in self._from_itself
        ]
        self._thread = thread
        if not (expected or contents or written):
            return None

        def meet() -> None:
            for obj, name, then in expected:
                _compare(f"{names[id(obj)]}.{name}", then, _fact(getattr(obj, name, None)))
            for path, value, then in contents:
                _compare(path, then, _content(value))
            for obj, name, value in written:
                setattr(obj, name, value)

        return meet

    def missing(self, obj: Any, name: str) -> None:
        """An attribute was not found."""
        self.read(obj, name, None)

    def read(self, obj: Any, name: str, value: Any) -> Any:
        """An attribute was read."""
        of_class = isinstance(value, MethodType | nn.Module) or name in OF_ANY_MODULE
        known = get_ident() == self._thread and id(obj) in self._names
        if not known or of_class or name.startswith("__"):
            return value
        thread, self._thread = self._thread, 0
        try:
            self._note((id(obj), name), obj, value)
        finally:
            self._thread = thread
        return value

    def _note(self, key: _Key, obj: Any, value: Any) -> None:
        path, at = f"{self._names[key[0]]}.{key[1]}", id(value)
        is_container = isinstance(value, _CONTAINERS)
        if not is_container and not isinstance(value, (*LEAVES, Tensor)) and at not in self._names:
            self._names[at] = path
            self._held.append(value)
            if type(value) not in self._kinds and observe(type(value), self):
                self._kinds.add(type(value))
        if not self._in_graph:
            for each in (key, (at, None)) if is_container else (key,):
                self._breaks.read.add(each)
                self._refuse(each, path)
        elif key not in self._wrote:
            if key not in self._set:
                self._read.add(key)
            if key in self._breaks.wrote:
                self._expected.setdefault(key, (obj, _fact(value)))
            if is_container and at not in self._contents:
                self._held.append(value)
                self._contents[at] = path, value, _content(value)

    def wrote(self, obj: Any, name: Any) -> None:
        """An attribute was set."""
        if get_ident() != self._thread or id(obj) not in self._names:
            return
        key = id(obj), name
        if not self._in_graph:
            self._breaks.wrote.add(key)
        else:
            self._wrote[key] = obj
            self._set.add(key)
            if key in self._read:
                self._changes_itself(key, f"{self._names[key[0]]}.{name}")

    def _changes_itself(self, key: _Key, path: str) -> None:
        self._from_itself.add(key)
        if key in self._breaks.read:
            self._refuse(key, path)

    def _refuse(self, key: _Key, path: str) -> None:
        if key in self._from_itself:
            fact = "is changed by what it was before"
            self._refused = NotReplayed(where=user_line(), name=path, fact=fact)
            raise self._refused


def _content(value: Any) -> Any:
    """What a container holds."""
    held = vars(value) if isinstance(value, SimpleNamespace) else value
    if len(held) > _LONG:
        return len(held)
    if isinstance(held, dict):
        return {key: _fact(each) for key, each in held.items()}
    return set(held) if isinstance(held, set) else [*map(_fact, held)]


def _fact(value: Any) -> Any:
    """What is compared of a value."""
    if isinstance(value, Tensor):
        return place_of(value)
    return _content(value) if isinstance(value, _CONTAINERS) else value


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:
        return False


def _compare(path: str, then: Any, now: Any) -> None:
    """Raises NotReplayed for the first difference. A break may add keys, such as one for a size."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key, each in then.items():
            _compare(f"{path}[{key!r}]", each, now.get(key, "missing"))
    elif not _same(then, now):
        raise NotReplayed(name=path, fact=f"was {then!r} at the capture, and is {now!r} now")
