"""Python values as text that is equal in every process where the values are equal.

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

import torch

from ...torch_compat.basics.modules import untagged
from ...torch_compat.basics.tensors import as_bytes

DATA = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, range, slice)
_TORCH_DATA = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo),
    torch.SymInt,
)
_NAMED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.ClassMethodDescriptorType)
_OPAQUE = ("_thread.lock", "_thread.RLock", "_contextvars.ContextVar", "typing.TypeVar")
VERSIONED = {*sys.stdlib_module_names, "torch", "triton"}
"""Packages whose version is in every key: their code is not described."""
_OPERATORS = (types.FunctionType, classmethod, staticmethod, property)
_SILENT = {
    *("__doc__", "__init__", "__repr__", "__str__"),
    *("__reduce__", "__getstate__", "__setstate__"),
}
MAX_DEPTH = 100
_CACHED: Any = type(functools.lru_cache(len))
_WRAPPERS: tuple[tuple[Any, str], ...] = (
    ((types.MethodType, staticmethod, classmethod), "__func__"),
    (property, "fget"),
    ((functools.cached_property, functools.partialmethod), "func"),
    (_CACHED, "__wrapped__"),
)
"""Types of what wraps a function, and the attribute that holds the function."""
_STATED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (types.MethodType, "method", ("__func__", "__self__")),
    (property, "property", ("fget", "fset")),
    ((staticmethod, classmethod), "", ("__func__",)),
    (_CACHED, "cached", ("__wrapped__",)),
)
"""Types that are described by some of their attributes, with their label; "" is their name."""


class Undescribable(Exception):
    """A value without a stable description; `where` is its place below the value asked for."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where.lstrip('.') or 'the value'} {reason}")
        self.where, self.reason = where, reason


def stable_text(value: Any, where: str = "", outer: tuple[int, ...] = ()) -> str:
    """`value` as text; raises Undescribable.

    `where` is the place that an error names. `outer` holds the ids of the values around it, so that
    cycles end.
    """
    if (text := plain_text(value, where, outer)) is not None:
        return text
    if id(value) in outer:
        return f"<object {outer.index(id(value))}>"
    if len(outer) > MAX_DEPTH:
        raise Undescribable(where, "is nested too deeply")
    outer = (*outer, id(value))
    kind = type(value)
    if kind in (set, frozenset):
        items = sorted(stable_text(item, where, outer) for item in value)
        return f"{kind.__name__}({{{', '.join(items)}}})"
    if kind is dict:
        named = ((stable_text(key, where, outer), item) for key, item in value.items())
        items = [f"{key}: {stable_text(item, f'{where}[{key}]', outer)}" for key, item in named]
        return f"{{{', '.join(sorted(items))}}}"
    label, parts = decomposed(value, where)
    texts = [(name, stable_text(part, where + name, outer)) for name, part in parts]
    if kind in (list, tuple):
        inner = ", ".join(text for _, text in texts)
        return f"[{inner}]" if kind is list else f"({inner})"
    shown = ", ".join(f"{name.lstrip('.')}={text}" for name, text in texts)
    return f"{label}({shown})"


def plain_text(value: Any, where: str = "", outer: tuple[int, ...] = ()) -> str | None:
    """The text of what has no parts, and of functions, classes and modules; else None."""
    kind = type(value)
    if kind in DATA:
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{class_name(kind)}.{value.name} = {stable_text(value.value, where, outer)}"
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
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, torch.nn.Module):
        return f"a {class_name(kind)}"
    return _torch_text(value) if package_of(kind) == "torch" else None


def _torch_text(value: Any) -> str | None:
    kind = type(value)
    if kind in _TORCH_DATA:
        return str(value)
    if kind is torch.Size:
        return f"torch.Size({list(value)})"
    if kind.__name__ == "ProcessGroup":  # a build of torch may lack it
        ranks = torch.distributed.get_process_group_ranks(value)
        return f"ProcessGroup {value.group_name} {value.name()} rank {value.rank()} of {ranks}"
    if kind.__name__ in ("OpOverload", "OpOverloadPacket", "Library"):
        return f"{kind.__name__} {getattr(value, 'ns', value)}"
    return None


def tensor_text(value: torch.Tensor) -> str:
    """The form of a tensor, without its content."""
    strides = f" strides {tuple(value.stride())}" if not value.is_contiguous() else ""
    grad = " requires_grad" if value.requires_grad else ""
    kind = "" if class_name(type(value)) == "torch.Tensor" else f" {class_name(type(value))}"
    return f"{value.dtype}{list(value.shape)}{strides} {value.device.type}{grad}{kind}"


def tensor_digest(value: torch.Tensor) -> str:
    """sha256 in hex of a tensor's content."""
    return hashlib.sha256(as_bytes(value.detach().cpu()).numpy().tobytes()).hexdigest()


def function_text(function: types.FunctionType) -> str:
    """A function by name and code."""
    name = f"{function.__module__}.{function.__qualname__}"
    return f"{name} <code {code_digest(function.__code__)[:16]}>"


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


def _constant(value: Any) -> str:
    """A constant of a code object, without a trace of hash order."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(_constant, value))}"
    return f"{type(value).__qualname__}:{value!r}"


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def class_text(cls: type) -> str:
    """A class by name, bases, which operators it defines and, of a dataclass, its fields.

    Classes of torch and the standard library are known by their name.
    """
    if package_of(cls) in VERSIONED:
        return class_name(cls)
    bases = [class_name(base) for base in cls.__mro__[1:-1]]
    operators = {
        name
        for base in cls.__mro__
        if package_of(base) not in VERSIONED
        for name, value in vars(base).items()
        if name.startswith("__") and (isinstance(value, _OPERATORS) or value is None)
    }
    fields = list(getattr(cls, "__dataclass_fields__", ()))
    shown = ", ".join(bases + sorted(operators - _SILENT) + fields)
    return f"{class_name(cls)}({shown})" if shown else class_name(cls)


def unwrapped(member: Any) -> Any:
    """The function inside a property, method, classmethod, cached function and the like."""
    for _ in range(MAX_DEPTH):
        if (inner := _inside_wrapper(member)) is None:
            return member
        member = inner
    return member


def _inside_wrapper(member: Any) -> Any:
    if isinstance(member, types.FunctionType | type):
        return untagged(member)
    for kinds, name in _WRAPPERS:
        if isinstance(member, kinds):
            return getattr(member, name)
    try:
        return object.__getattribute__(member, "__dict__").get("__wrapped__")
    except AttributeError:
        return None


def decomposed(value: Any, where: str) -> tuple[str, list[tuple[str, Any]]]:
    """The class of a value and its parts by the name under which each is reached from it."""
    kind = type(value)
    for kinds, label, names in _STATED:
        if isinstance(value, kinds):
            stated = ((f".{name}", getattr(value, name)) for name in names)
            return label or kind.__name__, [part for part in stated if part[1] is not None]
    if isinstance(value, types.BuiltinMethodType):
        return f"method {value.__name__}", [(".__self__", value.__self__)]
    if isinstance(value, weakref.ReferenceType):
        return "weakref", [(".()", value())]
    parts: list[tuple[str, Any]] = []
    if isinstance(value, functools.partial):
        parts = [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, Mapping):
        items = ((stable_text(key), item) for key, item in value.items())
        parts += [(f"[{key}]", item) for key, item in sorted(items, key=lambda item: item[0])]
    elif isinstance(value, list | tuple | collections.deque):
        parts += [(f"[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, set | frozenset):
        parts += [("{}", sorted(map(stable_text, value)))]
    elif isinstance(value, DATA):  # a subclass of a number or a string
        parts += [("()", next(base for base in kind.__mro__ if base in DATA).__call__(value))]
    attributes = dict(_attributes(value))
    parts += [(f".{name}", attributes[name]) for name in sorted(attributes)]
    if not parts and not isinstance(value, list | tuple | dict | collections.deque):
        return _reduced(value, where)
    return class_name(kind), parts


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
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
    undescribed = Undescribable(where, f"is a {label}, which has no description")
    if type(value) is object:
        raise Undescribable(where, "is a bare object, which has no content")
    try:
        reduced = value.__reduce_ex__(2)
    except Exception as error:
        raise undescribed from error
    if isinstance(reduced, str):
        return f"{label} {reduced}", []
    constructor, arguments, *state = reduced
    if getattr(constructor, "__name__", "") in ("__newobj__", "_reconstructor"):
        reduces: Any = type(value).__reduce_ex__
        if reduces is object.__reduce_ex__ and not _is_python(type(value)):
            raise undescribed
        arguments = arguments[1:]
    parts = [(f"({i})", argument) for i, argument in enumerate(arguments)]
    parts += [
        (f"<{i}>", list(part) if hasattr(part, "__next__") else part)
        for i, part in enumerate(state)
        if part is not None
    ]
    return label, parts


def _is_python(cls: type) -> bool:
    """Whether every class it inherits from is written in Python: then it has no hidden state."""
    return all(base is object or base.__flags__ & (1 << 9) for base in cls.__mro__)


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
