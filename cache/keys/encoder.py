"""One encoding of Python values as text that is equal in every process where the values are equal.

Data is described by content, an object by its class and fields, a function by its name and code.
What a function calls is not followed; see code.py.

No text holds an address, an order of hashing, a file name or a line number. A value that cannot be
described raises `Undescribable`: what depends on it must not be cached.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import inspect
import logging
import re
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

DATA = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, range, slice)
_TORCH_DATA = {"dtype", "device", "layout", "memory_format", "Size", "finfo", "iinfo", "SymInt"}
_NAMED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.ClassMethodDescriptorType)
_OPAQUE = ("_thread.lock", "_thread.RLock", "_contextvars.ContextVar", "typing.TypeVar")
KNOWN = {*sys.stdlib_module_names, "torch", "triton"}
"""Packages whose code is known by a version that is in every key."""
_METHODS = (types.FunctionType, classmethod, staticmethod, property)
_SILENT = {
    "__doc__",
    "__init__",
    "__repr__",
    "__str__",
    "__reduce__",
    "__getstate__",
    "__setstate__",
}
MAX_DEPTH = 100
_CACHED: Any = type(functools.lru_cache(len))


class Undescribable(Exception):
    """A value without a stable description; `where` is its place below the value asked for."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where.lstrip('.') or 'the value'} {reason}")
        self.where, self.reason = where, reason


def stable_text(value: Any) -> str:
    """`value` as text; raises Undescribable."""
    return Encoder().text(value, "")


@functools.lru_cache(maxsize=1 << 16)
def code_digest(code: types.CodeType) -> str:
    """sha256 in hex of what a code object does: no file name, no line numbers.

    Two codes that differ only in their lines are equal to Python as well, and share the digest.
    """
    counts = (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    constants = [_constant(const) for const in code.co_consts]
    digest = hashlib.sha256(repr((counts, names, constants)).encode(errors="surrogatepass"))
    digest.update(len(code.co_code).to_bytes(8, "big") + code.co_code + code.co_exceptiontable)
    return digest.hexdigest()


def function_text(function: types.FunctionType) -> str:
    """A function by name and code."""
    name = f"{function.__module__}.{function.__qualname__}"
    return f"{name} <code {code_digest(function.__code__)[:16]}>"


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def class_text(cls: type) -> str:
    """A class by name, bases, which operators it defines and, of a dataclass, its fields.

    Classes of torch and the standard library are known by their name.
    """
    if package_of(cls) in KNOWN:
        return class_name(cls)
    bases = [class_name(base) for base in cls.__mro__[1:-1]]
    operators = {
        name
        for each in cls.__mro__
        if package_of(each) not in KNOWN
        for name, value in vars(each).items()
        if name.startswith("__") and (isinstance(value, _METHODS) or value is None)
    }
    fields = list(getattr(cls, "__dataclass_fields__", ()))
    shown = ", ".join(bases + sorted(operators - _SILENT) + fields)
    return f"{class_name(cls)}({shown})" if shown else class_name(cls)


def unwrapped(member: Any) -> Any:
    """The function inside a property, method, classmethod, cached function and the like."""
    for _ in range(MAX_DEPTH):
        inner = _inside_wrapper(member)
        if inner is None:
            return member
        member = inner
    return member


def _inside_wrapper(member: Any) -> Any:
    if isinstance(member, types.FunctionType | type):
        return None
    if isinstance(member, types.MethodType | staticmethod | classmethod):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property | functools.partialmethod):
        return member.func
    if isinstance(member, _CACHED):
        return member.__wrapped__
    try:
        return object.__getattribute__(member, "__dict__").get("__wrapped__")
    except AttributeError:
        return None


class Encoder:
    """Text of one value. Objects in progress are numbered, so that cycles end."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}

    def text(self, value: Any, where: str) -> str:
        if (plain := self.plain(value, where)) is not None:
            return plain
        if id(value) in self._open:
            return f"<object {self._open[id(value)]}>"
        if len(self._open) > MAX_DEPTH:
            raise Undescribable(where, "is nested too deeply")
        self._open[id(value)] = len(self._open)
        try:
            return self._composite(value, where)
        finally:
            del self._open[id(value)]

    def plain(self, value: Any, where: str) -> str | None:
        """The text of what has no parts, and of functions, classes and modules; else None."""
        kind = type(value)
        if kind in DATA:
            return repr(value)
        if isinstance(value, enum.Enum):
            return f"{class_name(kind)}.{value.name} = {self.text(value.value, where)}"
        if isinstance(value, type):
            return class_text(value)
        if isinstance(value, types.FunctionType):
            return function_text(value)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, types.CodeType):
            return f"<code {code_digest(value)[:16]}>"
        if isinstance(value, _NAMED) and not _is_bound(value):
            return f"{getattr(value, '__module__', None) or ''}.{value.__qualname__}"
        if isinstance(value, _SLOTS):
            return f"{kind.__name__} {value.__qualname__}"
        if isinstance(value, re.Pattern):
            return f"{class_name(kind)} {value.pattern!r} {value.flags}"
        if isinstance(value, logging.Logger) or class_name(kind) in _OPAQUE:
            return f"{class_name(kind)} {getattr(value, 'name', '')}"
        return _torch_text(value)

    def _composite(self, value: Any, where: str) -> str:
        kind = type(value)
        if kind in (set, frozenset):
            return f"{kind.__name__}({{{', '.join(sorted(self.text(v, where) for v in value))}}})"
        if kind is dict:
            return f"{{{', '.join(self._items(value, where))}}}"
        label, fields = decomposed(value, where)
        if kind in (list, tuple):
            inner = ", ".join(self.text(item, where + name) for name, item in fields)
            return f"[{inner}]" if kind is list else f"({inner})"
        shown = (f"{name.lstrip('.')}={self.text(v, where + name)}" for name, v in fields)
        return f"{label}({', '.join(shown)})"

    def _items(self, value: Mapping[Any, Any], where: str) -> list[str]:
        named = ((self.text(key, where), item) for key, item in value.items())
        return sorted(f"{key}: {self.text(item, f'{where}[{key}]')}" for key, item in named)


def decomposed(value: Any, where: str) -> tuple[str, list[tuple[str, Any]]]:
    """The class of a value and its parts by the name under which each is reached from it."""
    kind = type(value)
    label = class_name(kind)
    fields: list[tuple[str, Any]] = []
    if isinstance(value, functools.partial):
        fields = [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    elif isinstance(value, types.MethodType):
        return "method", [(".__func__", value.__func__), (".__self__", value.__self__)]
    elif isinstance(value, types.BuiltinMethodType):
        return f"method {value.__name__}", [(".__self__", value.__self__)]
    elif isinstance(value, property):
        accessors = (("fget", value.fget), ("fset", value.fset))
        return "property", [(f".{name}", each) for name, each in accessors if each]
    elif isinstance(value, staticmethod | classmethod):
        return kind.__name__, [(".__func__", value.__func__)]
    elif isinstance(value, weakref.ReferenceType):
        return "weakref", [(".()", value())]
    elif isinstance(value, _CACHED):
        return "cached", [(".__wrapped__", value.__wrapped__)]
    if isinstance(value, Mapping):
        texts = sorted(
            ((stable_text(key), item) for key, item in value.items()), key=lambda i: i[0]
        )
        fields += [(f"[{key}]", item) for key, item in texts]
    elif isinstance(value, list | tuple | collections.deque):
        fields += [(f"[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, set | frozenset):
        fields += [("{}", sorted(map(stable_text, value)))]
    elif isinstance(value, DATA):  # a subclass of a number or a string
        fields += [("()", next(b for b in kind.__mro__ if b in DATA).__call__(value))]
    attributes = dict(_own_fields(value))
    fields += [(f".{name}", attributes[name]) for name in sorted(attributes)]
    if not fields and not isinstance(value, list | tuple | dict | collections.deque):
        return _reduced(value, where)
    return label, fields


def _own_fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Instance attributes, those in slots included."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield name, getattr(value, name)


def _reduced(value: Any, where: str) -> tuple[str, list[tuple[str, Any]]]:
    """A value without fields, by what pickle would store of it."""
    label = class_name(type(value))
    if type(value) is object:
        raise Undescribable(where, "is a bare object, which has no content")
    try:
        reduced = value.__reduce_ex__(2)
    except Exception as error:
        raise Undescribable(where, f"is a {label}, which has no description") from error
    if isinstance(reduced, str):
        return f"{label} {reduced}", []
    made_by, arguments, *state = reduced
    if getattr(made_by, "__name__", "") in ("__newobj__", "_reconstructor"):
        reduces: Any = type(value).__reduce_ex__
        if reduces is object.__reduce_ex__ and not _is_python(type(value)):
            raise Undescribable(where, f"is a {label}, which has no description")
        arguments = arguments[1:]
    parts = [(f"({i})", each) for i, each in enumerate(arguments)]
    parts += [
        (f"<{i}>", list(each) if hasattr(each, "__next__") else each)
        for i, each in enumerate(state)
        if each is not None
    ]
    return label, parts


def _is_python(cls: type) -> bool:
    """Whether every class it inherits from is written in Python: then it has no hidden state."""
    return all(each is object or each.__flags__ & (1 << 9) for each in cls.__mro__)


def _is_bound(value: Any) -> bool:
    owner = getattr(value, "__self__", None)
    return owner is not None and not isinstance(owner, types.ModuleType | type)


def package_of(value: Any) -> str:
    """The package whose version says what a value is; none where a module of the user's has the
    name of one of Python's."""
    return package_named(getattr(value, "__module__", None))


def package_named(module: Any) -> str:
    """`package_of` for what is in the module of this name."""
    package = str(module or "").partition(".")[0]
    if package in sys.stdlib_module_names:
        file = getattr(sys.modules.get(package), "__file__", None)
        return package if file is None or is_standard_file(file) else ""
    return package


def is_standard_file(file: str) -> bool:
    """Whether a file is one of the standard library."""
    return file.startswith(("<frozen ", _STANDARD)) and "-packages/" not in file


_STANDARD = f"{inspect.getfile(inspect).rpartition('/')[0]}/"


def _torch_text(value: Any) -> str | None:
    """Text of torch's own values, recognized by name so that torch need not be imported."""
    kind = type(value)
    if package_of(kind) != "torch" and not is_tensor(value) and not _is_module(value):
        return None
    if kind.__name__ in _TORCH_DATA:
        return str(value) if kind.__name__ != "Size" else f"torch.Size({list(value)})"
    if is_tensor(value):
        return tensor_text(value)
    if _is_module(value):
        return f"a {class_name(kind)}"
    if kind.__name__ == "ProcessGroup":
        ranks = sys.modules["torch.distributed"].get_process_group_ranks(value)
        return f"ProcessGroup {value.group_name} {value.name()} rank {value.rank()} of {ranks}"
    if kind.__name__ in ("OpOverload", "OpOverloadPacket", "Library"):
        return f"{kind.__name__} {getattr(value, 'ns', value)}"
    return None


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def tensor_text(value: Any) -> str:
    strides = f" strides {tuple(value.stride())}" if not value.is_contiguous() else ""
    grad = " requires_grad" if value.requires_grad else ""
    kind = "" if class_name(type(value)) == "torch.Tensor" else f" {class_name(type(value))}"
    return f"{value.dtype}{list(value.shape)}{strides} {value.device.type}{grad}{kind}"


def _constant(value: Any) -> str:
    """A constant of a code object, without a trace of hash order."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(_constant, value))}"
    return f"{type(value).__qualname__}:{value!r}"
