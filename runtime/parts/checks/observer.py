"""Notes what Python reads of an object and of all that it holds, without changing what it reads.

A class is observed, not an object: while an observer is open, `__getattribute__` and `__setattr__`
of the classes of what was handed out are replaced. So `type`, `isinstance`, identity, operators and
methods are those of the object. What an attribute holds is observed when the attribute is read.

Of built-in containers all items are noted when they are handed out. Only for a dict and a
SimpleNamespace, of which an engine may change what no graph reads, an equal one of a subclass is
handed out that notes what is read of it, and that writes to the original, too. Code that tells
them apart, by `type(x) is dict`, is given the object itself, of which all is noted: see
`Recorder.choose_noting`.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from enum import Enum
from functools import partial
from inspect import getmro
from numbers import Number
from threading import Lock, get_ident
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NoReturn, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

LEAVES = (
    bool, int, float, complex, str, bytes, type(None), type, Enum, range, slice, torch.Size,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Values that are compared by `==`."""

_METHODS = (MethodType, BuiltinMethodType)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType)
_ARRAY_FORM = ("dtype", "shape", "strides", "typecode", "format")
"""Attributes of arrays of numpy and of the standard library."""
_HASHES = (FunctionType, type(None))
"""A class with one of these compares its objects in Python, or not by their content."""
OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that torch gives to each module."""
_READS_ONE = (nn.Module.__setattr__.__code__.co_filename, functools.__file__)
"""Their code (`nn.Module`, `cached_property`) reads all where one attribute is read or set."""
_OF_FUNCTION = ("__dict__", "__defaults__", "__kwdefaults__")
_READ_WHOLE = frozenset({"__dict__", "__reduce_ex__", "__reduce__", "__getstate__"})
"""Attributes through which `vars` and `copy` read all others."""


class Noting(Protocol):
    """Takes what was read. A path is an expression."""

    def value(self, path: str, value: Any) -> None:
        """Of a value that `==` compares."""

    def form(self, path: str, value: Any) -> None:
        """Of an object whose class counts, and the place of a tensor."""

    def identity(self, path: str, value: Any) -> None:
        """Of an object that nothing else can compare."""

    rarely: bool
    """Whether what is noted now is held by a module or a class, of which there are many and few
    change."""

    def changes_itself(self, path: str) -> None:
        """What was read was written, too: by code that a graph does not run."""

    def refuse(self, path: str, reason: str) -> NoReturn:
        """Of what no later step could be compared with. Raises ReadNotKept."""

    def bound(self, path: str, value: Any) -> None:
        """Of a number that may fall."""

    def key(self, key: Any) -> str:
        """The expression of a key."""


class Sees:
    """Is told what one thread reads of the objects of its classes, and sets, while it is open."""

    def __init__(self) -> None:
        self._thread = 0
        self._paths: dict[int, str] = {}
        """By identity of an object, which is unique while the objects live."""
        self._held: list[Any] = []
        self._kinds = set[type]()

    def read(self, obj: Any, name: str, value: Any) -> Any:
        """An attribute was read: what the reader is given."""
        return value

    def missing(self, obj: Any, name: str) -> None:
        """An attribute was not found."""

    def wrote(self, obj: Any, name: Any) -> None:
        """An attribute was set."""

    def open(self) -> None:
        self._thread = get_ident()
        for kind in self._kinds:
            observe(kind, self)

    def close(self) -> None:
        self._thread = 0
        for kind in self._kinds:
            observe_no_longer(kind, self)

    def _know(self, path: str, value: Any) -> None:
        self._paths[id(value)] = path
        self._held.append(value)

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
        thread, self._thread = self._thread, 0
        try:
            yield
        finally:
            self._thread = thread


class Observer(Sees):
    """Observes what this thread reads of `root` between `open` and `close`; the names of its
    attributes are the first parts of paths."""

    def __init__(self, root: Any, noting: Noting, whole: bool = False) -> None:
        """`whole`: nothing stands in for a dict, of which all is noted."""
        super().__init__()
        self._noting = noting
        self._nothing_stands_in = whole
        self._stand_ins: dict[int, Any] = {}
        self._written = set[tuple[int, Any]]()
        self._of_modules = set[int]()
        self._derived: dict[int, tuple[Callable[[], Any], list[Tensor]]] = {}
        """By identity of a tensor that was computed: the tensors that were handed out for it."""
        super()._know("", root)
        self._kinds.add(type(root))

    def forget(self) -> None:
        """Observe nothing any more. A stand-in may outlive the capture."""
        held = (
            *(self._paths, self._stand_ins, self._written, self._of_modules, self._held),
            self._derived,
        )
        for holds in (*held, self._kinds):
            holds.clear()

    def paths(self) -> Mapping[int, str]:
        """Of the objects and tensors that were handed out, by identity. That of the root is ""."""
        return self._paths

    @contextmanager
    def _path_of(self, obj: Any, name: Any) -> Iterator[str | None]:
        """The path of an object of which `name` is read, None if that is not to be noted. What is
        read inside the block, to note it, is not."""
        if get_ident() != self._thread or (id(obj), name) in self._written:
            yield None  # what other threads read hides nothing of this one
            return
        with self._unobserved():
            self._noting.rarely = id(obj) in self._of_modules
            yield self._paths.get(id(obj))

    def read(self, obj: Any, name: str, value: Any) -> Any:
        kind = type(obj)
        with self._path_of(obj, name) as path:
            if path is None:
                return value
            reads_one = sys._getframe(2).f_code.co_filename in _READS_ONE
            if name in _READ_WHOLE and hasattr(obj, "__dict__") and not reads_one:
                self._attributes(path, obj)
            if name.startswith("__") or self._is_stated(kind, f"{path}.{name}", name, value):
                return value
            if isinstance(value, _METHODS) and (value.__self__ is obj or value.__self__ is kind):
                if isinstance(value, BuiltinMethodType) and not _has_content(kind):
                    self._noting.refuse(path, f"a {kind.__name__}, of which C code has a part")
                return value  # what it reads is noted when it does
            if isinstance(obj, nn.Module) and name in OF_ANY_MODULE:
                if isinstance(value, dict):  # what it holds, and its hooks
                    self._whole(f"{path}.{name}", value)
                return value
            return self._hand_out(f"{path}.{name}".lstrip("."), value)

    def missing(self, obj: Any, name: str) -> None:
        with self._path_of(obj, name) as path:
            if path is not None and not name.startswith("__"):
                self._noting.value(f"hasattr({path}, {name!r})", False)

    def wrote(self, obj: Any, name: Any) -> None:
        """From now on it is not the step's."""
        self._written.add((id(obj), name))
        if id(obj) in self._of_modules:
            part = f"[{self._noting.key(name)}]" if isinstance(obj, dict) else f".{name}"
            self._noting.changes_itself(self._paths[id(obj)] + part)

    def item(self, mapping: Mapping[Any, Any], key: Any, value: Any) -> Any:
        """An item was read: what the reader is given."""
        with self._path_of(mapping, key) as path:
            if path is None:
                return value
            return self._hand_out(f"{path}[{self._noting.key(key)}]", value)

    def fact(self, mapping: Mapping[Any, Any], expression: str, key: Any, value: Any) -> None:
        """`expression` of a mapping (`{}`) and a key (`{key}`) was read."""
        with self._path_of(mapping, key) as path:
            if path is not None:
                text = expression.format(path, key=self._noting.key(key))
                self._noting.value(text, value)

    def tensor_fact(self, tensor: Tensor, name: str, given: Any, value: Any) -> None:
        """An attribute of a tensor, such as its shape, was read, or a method called with `given`,
        positional arguments and keywords."""
        with self._path_of(tensor, None) as path:
            if path is not None:
                if given is not None:
                    key, (args, kwargs) = self._noting.key, given
                    texts = [*map(key, args), *(f"{n}={key(v)}" for n, v in kwargs.items())]
                    name += f"({', '.join(texts)})"
                self._noting.value(f"{path}.{name}", value)
        for base in self._derived_from(tensor):
            self.tensor_fact(base, "shape", None, base.shape)

    def tensor_part(self, tensor: Tensor, name: str, value: Any) -> None:
        """An attribute of a tensor was read that is None, a tensor, or something of torch."""
        with self._path_of(tensor, None) as path:
            if path is not None and (value is None or isinstance(value, Tensor)):
                self._hand_out(f"{path}.{name}", value)
            elif path is not None:
                self._noting.value(f"({path}.{name} is None)", False)

    def derived(self, tensors: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """`tensors` were computed from `given`: their sizes follow from the sizes of these."""
        bases = [self._derived_from(each) or [each] for each in given]
        if bases and all(id(each) in self._paths for base in bases for each in base):
            for tensor in tensors:
                if id(tensor) not in self._paths:
                    held = [each for base in bases for each in base]
                    self._derived[id(tensor)] = ref(tensor), held

    def _derived_from(self, tensor: Tensor) -> list[Tensor]:
        alive, bases = self._derived.get(id(tensor), (type(None), []))
        return bases if alive() is tensor else []

    def _hand_out(self, path: str, value: Any) -> Any:
        """Note what `value` is; returns it, or what stands in for it."""
        noting, kind = self._noting, type(value)
        known = self._paths.get(id(value))
        if isinstance(value, LEAVES):
            noting.value(path, value)
            if isinstance(value, type):
                self._of_class(value)
            elif kind not in LEAVES:
                self._keep(path, value)  # a class of one's own may have attributes
        elif known is not None and not isinstance(value, tuple):  # equal ones may be one
            if path != known:
                noting.value(f"({path} is {known})", True)
            return self._stand_ins.get(id(value), value)
        elif isinstance(value, Tensor):
            self._tensor(path, value)
        elif kind is dict or kind is SimpleNamespace:
            if self._nothing_stands_in:
                self._keep(path, value)
                self._whole(path, value)
                return value
            noting.form(path, value)
            made = ObservedDict(self, value) if kind is dict else ObservedNamespace(value)
            self._stand_ins[id(value)] = made
            self._know(path, value)
            self._keep(path, made)
            return made
        elif isinstance(value, nn.Module):
            noting.identity(path, value)
            self._of_modules.add(id(value))
            self._keep(path, value)
        elif isinstance(value, _CONTAINERS):
            noting.form(path, value)
            self._keep(path, value)
            return self._container(path, value)
        else:
            self._opaque(path, value)
        return value

    def _tensor(self, path: str, tensor: Tensor) -> None:
        self._noting.form(path, tensor)
        if not tensor.numel():  # no memory to compare: a step has no rows either
            self._noting.value(f"{path}.numel()", 0)
        self._know(path, tensor)
        rarely, self._noting.rarely = self._noting.rarely, not tensor.__dict__
        self._attributes(path, tensor)  # of most there are none
        self._noting.rarely = rarely

    def _opaque(self, path: str, value: Any) -> None:
        """Note an object of a class, or what C code has made."""
        noting, kind = self._noting, type(value)
        if hasattr(kind, "tobytes"):  # an array of numpy, which may not be installed
            noting.form(path, value)
            for name in filter(partial(hasattr, kind), _ARRAY_FORM):
                noting.value(f"{path}.{name}", getattr(value, name))
            if getattr(getattr(value, "dtype", None), "hasobject", False):
                self._whole(f"{path}.tolist()", value.tolist())
            else:
                noting.value(f"{path}.tobytes()", value.tobytes())
            self._own_attributes(path, value)
            return
        observed = self._keep(path, value)
        if hasattr(kind, "__next__") and not observed:
            noting.refuse(path, f"a {kind.__name__}, which gives something else each time")
        if kind is bytearray:
            noting.value(f"bytes({path})", bytes(value))
        elif isinstance(value, ref | partial):
            noting.form(path, value)
        elif _has_content(kind):
            noting.value(path, value)  # a date, a Decimal, a method: `==` of C code
        elif observed or self._state(path, value):
            noting.form(path, value)
        else:
            noting.identity(path, value)
        if isinstance(value, ModuleType) and value is not builtins:
            self._statics(value)
        for expression, part in _parts(value):
            self._whole(f"{path}{expression}", part)

    def _state(self, path: str, value: Any) -> bool:
        """Note what pickle would keep of an object of C code, and its attributes; whether it is all
        of it."""
        self._own_attributes(path, value)
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:
            return False
        if is_whole := isinstance(reduced, tuple) and not isinstance(value, FunctionType):
            self._whole(f"{path}.__reduce_ex__(2)[1:3]", reduced[1:3])
        return is_whole

    def _own_attributes(self, path: str, value: Any) -> None:
        if getattr(value, "__dict__", None) and not isinstance(value, ModuleType):
            self._attributes(path, value)

    def _attributes(self, path: str, obj: Any) -> None:
        """Note all attributes of an object, whose `__dict__` the reader is given."""
        of_step = {n: each for n, each in vars(obj).items() if (id(obj), n) not in self._written}
        if len(of_step) == len(vars(obj)):
            self._noting.value(f"[*vars({path})]", list(of_step))
        for name, item in of_step.items():
            if not self._is_stated(type(obj), f"{path}.{name}", name, item):
                self._whole(f"{path}.{name}", item)

    def _is_stated(self, kind: type, path: str, name: str, value: Any) -> bool:
        """Whether a class states what may differ in `name`; notes the bound of a number."""
        is_bound = isinstance(value, Number) and name in _names(kind, "graph_bounds")
        if is_bound:
            self._noting.bound(path, value)
        return is_bound or name in _names(kind, "graph_constants")

    def _whole(self, path: str, value: Any) -> None:
        """Note a value that the reader is given as it is, with nothing that stands in for it."""
        if type(value) is SimpleNamespace:
            self._noting.form(path, value)
            self._attributes(path, value)
        elif isinstance(value, Mapping | list | tuple | deque) and not isinstance(value, LEAVES):
            self._noting.form(path, value)
            for each, item in self._items(path, value):
                self._whole(each, item)
        else:
            self._hand_out(path, value)

    def _items(self, path: str, container: Any) -> list[tuple[str, Any]]:
        """Note the keys or the length of a container; its items, each with its path."""
        noting = self._noting
        if isinstance(container, Mapping):
            noting.value(f"[*{path}]", list(container))
            return [(f"{path}[{noting.key(key)}]", container[key]) for key in container]
        if isinstance(container, Set):
            path = f"[*{path}]"
            if all(isinstance(each, LEAVES) for each in container):
                noting.value(path, list(container))
                return []
        noting.value(f"len({path})", len(container))
        return [(f"{path}[{at}]", item) for at, item in enumerate(container)]

    def _keep(self, path: str, value: Any) -> bool:
        """Observe an object from now on; whether that is possible."""
        self._know(path, value)
        kind = type(value)
        observed = kind is not ObservedDict and observe(kind, self)
        if observed and kind not in self._kinds:
            self._kinds.add(kind)
            self._of_class(kind)
        return observed

    def _know(self, path: str, value: Any) -> None:
        super()._know(path, value)
        if self._noting.rarely:
            self._of_modules.add(id(value))

    def _of_class(self, kind: type) -> None:
        """Note what Python reads of a class unseen, as in `type(x).scale`."""
        for base in (*kind.__mro__[:-1], *getmro(type(kind))[:-2]):
            self._statics(base)

    def _statics(self, holder: Any) -> None:
        """Note the plain attributes of a class or a Python module."""
        rarely, self._noting.rarely = self._noting.rarely, True
        stated = (*_names(holder, "graph_constants"), "graph_constants", "graph_bounds")
        for name, value in vars(holder).items():
            if not name.isidentifier() or name.startswith("__") or name in stated:
                continue
            if _is_plain(value):
                self._noting.value(f"{self._noting.key(holder)}.{name}", value)
        self._noting.rarely = rarely

    def _container(self, path: str, value: Any) -> Any:
        """Note all items; returns the container, or one with what stands in for its items."""
        kind = type(value)
        items = self._items(path, value)
        if isinstance(value, deque | defaultdict):
            self._whole(f"{path}.__reduce_ex__(2)[1]", value.__reduce_ex__(2)[1])
        held = [self._hand_out(*each) for each in items]
        same = all(one is item for one, (_, item) in zip(held, items, strict=True))
        if same or isinstance(value, Set):
            return value
        made: Any
        if isinstance(value, Mapping):
            filled = dict(zip(value, held, strict=True))
            made = MappingProxyType(filled) if kind is MappingProxyType else copy(value)
            if isinstance(made, dict):
                made.update(filled)
        elif isinstance(value, tuple):
            made = tuple.__new__(kind, held)
            getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))
        else:
            made = copy(value)  # of a list or deque, with all else that it holds
            made.clear()
            made.extend(held)
        self._stand_ins[id(value)] = made
        self._know(path, made)
        return made


def _names(holder: Any, attribute: str) -> Collection[str]:
    """The names that a class states in `attribute`; one may be a text without a tuple around it."""
    names = getattr(holder, attribute, ())
    return (names,) if isinstance(names, str) else names


def is_value(kind: type) -> bool:
    """Whether `==` of C code compares objects of a class: equal ones may be one object, or two."""
    hashed: Any = kind.__hash__
    return not isinstance(hashed, _HASHES) and hashed is not object.__hash__


def _has_content(kind: type) -> bool:
    """Whether `==` of C code, or the items that were noted, compare objects of a class."""
    return is_value(kind) or issubclass(kind, _CONTAINERS)


def _is_plain(value: Any) -> bool:
    """Whether it is a value, or a container of such."""
    if type(value) in (dict, list, tuple, set, frozenset):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, LEAVES) and not isinstance(value, type)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What code that is given an object of C code gets from it, each with its expression."""
    if isinstance(value, partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, ref):
        return [("()", value())]
    if isinstance(value, ContextVar):
        return [(".get(None)", value.get(None))]
    if isinstance(value, _METHODS):
        return [(".__self__", value.__self__)]
    if not isinstance(value, FunctionType):
        return []
    cells = [(at, each) for at, each in enumerate(value.__closure__ or ()) if each != CellType()]
    held = [(f".__closure__[{at}].cell_contents", cell.cell_contents) for at, cell in cells]
    return [(f".{name}", getattr(value, name)) for name in _OF_FUNCTION] + held


_LOCK = Lock()
_HOOKED = ("__getattribute__", "__setattr__")


def observe(kind: type, observer: Sees) -> bool:
    """Whether a class can be observed: one that C code made cannot."""
    with _LOCK:
        observers = getattr(kind.__dict__.get("__getattribute__"), "observers", None)
        if observers is None:
            observers, own = [], {n: kind.__dict__[n] for n in _HOOKED if n in kind.__dict__}
            read, write = _hooks(kind, observers)
            read.observers, read.own = observers, own  # type: ignore[attr-defined]
            try:
                kind.__getattribute__, kind.__setattr__ = read, write  # type: ignore[assignment]
            except (TypeError, AttributeError):
                return False
        if observer not in observers:
            observers.append(observer)
        return True


def observe_no_longer(kind: type, observer: Sees) -> None:
    with _LOCK:
        read: Any = kind.__dict__.get("__getattribute__")
        observers = getattr(read, "observers", [])
        if observer in observers:
            observers.remove(observer)
            if not observers:
                for name in _HOOKED:
                    delattr(kind, name)
                for name, value in read.own.items():
                    setattr(kind, name, value)


def _hooks(
    kind: type, observers: list[Sees]
) -> tuple[Callable[[Any, str], Any], Callable[[Any, str, Any], None]]:
    """`__getattribute__` and `__setattr__` of a class that is observed."""
    own_read: Callable[..., Any] = kind.__getattribute__
    own_write: Callable[..., None] = kind.__setattr__
    fall_back = getattr(kind, "__getattr__", None)

    def read(obj: Any, name: str) -> Any:
        try:
            value = own_read(obj, name)
        except AttributeError:
            try:
                if fall_back is None:
                    raise
                value = fall_back(obj, name)
            except AttributeError:
                for observer in tuple(observers):
                    observer.missing(obj, name)
                raise
        for observer in tuple(observers):
            value = observer.read(obj, name, value)
        return value

    def write(obj: Any, name: str, value: Any) -> None:
        own_write(obj, name, value)
        for observer in tuple(observers):
            observer.wrote(obj, name)

    return read, write


class ObservedNamespace(SimpleNamespace):
    """Stands in for a SimpleNamespace, whose class cannot be observed."""

    __slots__ = ("_original",)

    def __init__(self, original: SimpleNamespace) -> None:
        super().__init__(**vars(original))
        object.__setattr__(self, "_original", original)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        setattr(object.__getattribute__(self, "_original"), name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SimpleNamespace, (), dict(vars(self))

    def __repr__(self) -> str:
        return repr(SimpleNamespace(**vars(self)))

    def __eq__(self, other: object) -> Any:
        return isinstance(other, SimpleNamespace) and vars(self) == vars(other)

    __hash__ = None


class ObservedDict(dict[Any, Any]):
    """Stands in for a dict: notes what is read of it, and writes to the original, too."""

    __slots__ = ("_observer", "_original")

    def __init__(self, observer: Observer, original: dict[Any, Any]) -> None:
        super().__init__(original)
        self._observer, self._original = observer, original

    def __getitem__(self, key: Any) -> Any:
        if not super().__contains__(key):
            self._observer.fact(self, "({key} in {})", key, False)
        return self._observer.item(self, key, super().__getitem__(key))

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self._observer.fact(self, "({key} in {})", key, found)
        return found

    def __iter__(self) -> Iterator[Any]:
        self._observer.fact(self, "[*{}]", None, list(super().__iter__()))
        return super().__iter__()

    def __reversed__(self) -> Any:
        return reversed(list(self))

    def __len__(self) -> int:
        self._observer.fact(self, "len({})", None, super().__len__())
        return super().__len__()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._original[key] = value
        self._observer.wrote(self, key)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        del self._original[key]
        self._observer.wrote(self, key)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[Any, Any]:
        return dict(self)

    def popitem(self) -> tuple[Any, Any]:
        if not self:
            raise KeyError("popitem(): dictionary is empty")
        key = list(self)[-1]
        return key, self.pop(key)

    get = MutableMapping.get  # type: ignore[assignment]
    keys = MutableMapping.keys  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    pop = MutableMapping.pop
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault
    __eq__ = Mapping.__eq__
    __hash__ = None
