"""What Python inside graphs of a model that is not traced reads of it, and exchanges with breaks.

What was read of objects that modules hold is compared, as attributes of modules are: see
`module_state`. A replay runs the breaks, and no Python of the graphs between them. So attributes
that such Python sets are set again before the next break, and what it reads of attributes that
breaks set is compared in each step. Classes are observed, in a run before the first capture and in
each one. Of dicts, lists and namespaces that graphs and breaks read the content is compared.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cached_property, partial
from threading import get_ident
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ....compile.ir.locations import user_line
from ....errors import NotReplayed, StateChanged
from ....torch_compat.basics.modules import place_of
from .module_state import LONG
from .observer import LEAVES, OF_ANY_MODULE, Sees, observe

_CONTAINERS = (dict, list, set, deque, SimpleNamespace)
MISSING = "missing"
_Key = tuple[int, Any]
"""The identity of an object, and the name of an attribute; None for its content."""


Facts = dict[_Key, tuple[str, Any, str, Any]]
"""What graphs read of objects: the path, the object, the attribute, and what is compared of it: of
tensors the class, since a graph holds the memory that it reads, and `unwatched` names it."""
OfTensor = Callable[[Tensor], Any]


class BreakAccess:
    """What breaks of a model were seen to read and to set: also on a device, where no break runs
    in a capture."""

    def __init__(self, tell: Callable[..., object]) -> None:
        """`tell` is told once the path and the line of what a graph reads and then changes, which
        no replay does."""
        self.read = set[_Key]()
        self.wrote = set[_Key]()
        self._tell = tell
        self._dropped = set[str]()

    def drop(self, path: str) -> None:
        if path not in self._dropped:
            self._dropped.add(path)
            self._tell(changed=path, where=user_line())


class Exchanged(Sees):
    """Observes one run of a model: Python of a graph after `open`, of a break after `close`."""

    def __init__(self, model: nn.Module, breaks: BreakAccess) -> None:
        super().__init__()
        for path, module in model.named_modules():
            self._know(f"model.{path}".rstrip("."), module)
            self._kinds.add(type(module))
        self.facts: Facts = {}
        self._breaks = breaks
        self._in_graph = False
        self._read, self._set = dict[_Key, Any](), set[_Key]()
        self._from_itself = set[_Key]()
        """What graphs read, and then change."""
        self._refused: NotReplayed | StateChanged | None = None
        self._start_graph()
        for name, parameter in inspect.signature(model.forward).parameters.items():
            self._look_into(f"forward({name})", parameter.default)

    def _start_graph(self) -> None:
        self._wrote: dict[_Key, Any] = {}
        self._expected: dict[_Key, tuple[Any, Any]] = {}
        self._contents: dict[int, tuple[str, Any, Any]] = {}

    def open(self) -> None:
        if not self._thread:
            super().open()
        self._start_graph()
        self._in_graph = True

    def close(self) -> None:
        """Raises NotReplayed."""
        self._in_graph = False
        for at, (path, value, then) in self._contents.items():
            if not _same(_content(value), then):
                self._changes_itself((at, None), path, value)
        if self._refused is not None:
            raise self._refused

    def finish(self) -> None:
        super().close()
        changing = self._set | self._breaks.wrote
        self.facts = {key: fact for key, fact in self.facts.items() if key not in changing}

    def border(self, weak: Callable[[Any], Any]) -> Callable[[], None] | None:
        """What runs in each step between the break before the graph that was closed and the next:
        it compares what the graph reads of what breaks leave, and sets what the graph sets. Raises
        NotReplayed."""
        paths = self._paths
        expected = [(obj, key[1], then) for key, (obj, then) in self._expected.items()]
        contents = [each for at, each in self._contents.items() if (at, None) in self._breaks.read]
        written = [
            (obj, key[1], weak(self._unseen(obj, key[1])))
            for key, obj in self._wrote.items()
            if key not in self._from_itself
        ]
        if not (expected or contents or written):
            return None

        def meet() -> None:
            for obj, name, then in expected:
                _compare(f"{paths[id(obj)]}.{name}", then, _fact(getattr(obj, name, MISSING)))
            for path, value, then in contents:
                _compare(path, then, _content(value))
            for obj, name, value in written:
                setattr(obj, name, value)

        return meet

    def missing(self, obj: Any, name: str) -> None:
        self.read(obj, name, MISSING)

    def read(self, obj: Any, name: str, value: Any) -> Any:
        is_submodule = isinstance(value, nn.Module) and isinstance(obj, nn.Module)
        of_class = isinstance(value, MethodType) or is_submodule or name in OF_ANY_MODULE
        known = get_ident() == self._thread and id(obj) in self._paths
        if known and self._in_graph and isinstance(value, MethodType):
            self.facts.setdefault(
                (id(obj), name), (f"{self._paths[id(obj)]}.{name}", obj, name, value)
            )
        if not known or of_class or name.startswith("__"):
            return value
        with self._unobserved():
            self._note((id(obj), name), obj, value)
        return value

    def _note(self, key: _Key, obj: Any, value: Any) -> None:
        path, at = f"{self._paths[key[0]]}.{key[1]}", id(value)
        is_container = isinstance(value, _CONTAINERS)
        self._look_into(path, value)
        if not self._in_graph:
            for each in (key, (at, None)) if is_container else (key,):
                self._breaks.read.add(each)
                self._refuse(each, path)
        elif key not in self._wrote:
            if key not in self._set:
                self._read[key] = value
                if _is_of_object(obj, key[1], value):
                    self.facts.setdefault(key, (path, obj, key[1], _fact(value, type)))
            if key in self._breaks.wrote:
                self._expected.setdefault(key, (obj, _fact(value)))
            if is_container and at not in self._contents:
                self._contents[at] = path, value, _content(value)

    def _look_into(self, path: str, value: Any) -> None:
        """Observe an object, or those in a container."""
        value = value() if isinstance(value, ref) else value
        is_leaf = isinstance(value, (*LEAVES, Tensor)) and not isinstance(value, Enum)
        if is_leaf or id(value) in self._paths:
            return
        self._know(path, value)
        if not isinstance(value, (*_CONTAINERS, tuple)):
            if type(value) not in self._kinds and observe(type(value), self):
                self._kinds.add(type(value))
        elif len(held := _held(value)) <= LONG:
            for key, each in held.items() if isinstance(held, dict) else enumerate(held):
                self._look_into(f"{path}[{key!r}]", each)

    def wrote(self, obj: Any, name: Any) -> None:
        if get_ident() != self._thread or id(obj) not in self._paths:
            return
        key = id(obj), name
        if not self._in_graph:
            self._breaks.wrote.add(key)
        else:
            self._wrote[key] = obj
            self._set.add(key)
            if key in self._read and (now := self._unseen(obj, name)) is not self._read[key]:
                self._changes_itself(key, f"{self._paths[key[0]]}.{name}", now)

    def _unseen(self, obj: Any, name: str) -> Any:
        with self._unobserved():
            return getattr(obj, name, None)

    def _changes_itself(self, key: _Key, path: str, now: Any) -> None:
        """As a trace does: numbers are dropped with a warning, tensors are refused."""
        self._from_itself.add(key)
        if key in self._breaks.read:
            self._refuse(key, path)
        elif isinstance(now, Tensor):
            self._refused = StateChanged(where=user_line(), name=path)
            raise self._refused
        else:
            self._breaks.drop(path)

    def _refuse(self, key: _Key, path: str) -> None:
        if key in self._from_itself:
            fact = "is changed by what it was before"
            self._refused = NotReplayed(where=user_line(), name=path, fact=fact)
            raise self._refused


def changes(facts: Facts) -> Iterator[tuple[str, str, str] | None]:
    """What is different now of what graphs have read, its path, what was and what is; None where
    nothing is."""
    for path, obj, name, then in list(facts.values()):
        try:
            _compare(path, then, _fact(getattr(obj, name, MISSING), type))
            yield None
        except NotReplayed as error:
            yield error.facts["name"], error.facts["then"], error.facts["now"]


def _is_of_object(obj: Any, name: str, value: Any) -> bool:
    """Whether `module_state` does not compare an attribute: it is of an object or of a class. What
    a property reads is noted itself."""
    if isinstance(obj, nn.Module) and (name in vars(obj) or isinstance(value, Tensor)):
        return False
    static = inspect.getattr_static(type(obj), name, None)
    return not isinstance(static, property | cached_property | FunctionType)


def _held(value: Any) -> Any:
    return vars(value) if isinstance(value, SimpleNamespace) else value


def _content(value: Any, of_tensor: OfTensor = place_of) -> Any:
    """What a container holds."""
    held, fact = _held(value), partial(_fact, of_tensor=of_tensor)
    if len(held) > LONG:
        return len(held)
    if isinstance(held, dict):
        return {key: fact(each) for key, each in held.items()}
    return set(held) if isinstance(held, set) else [*map(fact, held)]


def _fact(value: Any, of_tensor: OfTensor = place_of) -> Any:
    """What is compared of a value."""
    if isinstance(value, Tensor):
        return of_tensor(value)
    return _content(value, of_tensor) if isinstance(value, _CONTAINERS) else value


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:
        return False


def _compare(path: str, then: Any, now: Any) -> None:
    """Raises NotReplayed for the first difference. A break may add keys, such as one for a size."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key, each in then.items():
            _compare(f"{path}[{key!r}]", each, now.get(key, MISSING))
    elif not _same(then, now):
        fact = f"was {then!r} at the capture, and is {now!r} now"
        raise NotReplayed(name=path, fact=fact, then=repr(then), now=repr(now))
