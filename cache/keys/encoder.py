"""One encoding of Python values as text that is equal in every process where the values are equal.

Two policies share it:

- `stable_text` describes a value: data by content, an object by its class and fields, a function by
  its name and code. What a function calls is not followed.
- `code_parts` and `fingerprint` describe code that runs: they also follow closures, defaults, the
  globals that a function names, methods and base classes. An installed package is a part by its
  version, and the interpreter and torch are versions in every key; their code is not followed.

No text holds an address, an order of hashing, a file name or a line number. A value that cannot be
described raises `Undescribable`: what depends on it must not be cached.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import importlib.metadata
import logging
import os
import re
import secrets
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .bytecode import attribute_names, code_digest, global_names, mutated_names
from .factors import Parts, Stable

_DATA = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, range, slice)
_TORCH_DATA = {"dtype", "device", "layout", "memory_format", "Size", "finfo", "iinfo", "SymInt"}
_NAMED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.ClassMethodDescriptorType)
_OPAQUE = ("_thread.lock", "_thread.RLock", "_contextvars.ContextVar", "typing.TypeVar")
_OPAQUE_CLASSES = (logging.Logger, type(re.compile("")))
_VERSIONED = {*sys.stdlib_module_names, "torch", "triton", "numpy", "sympy", "builtins"}
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TRITON_FIELDS = ("fn", "configs", "keys", "values", "noinline", "do_not_specialize")
MAX_DEPTH = 100
_CACHED: Any = type(functools.lru_cache(len))


class Undescribable(Exception):
    """A value without a stable description; `where` is its place below the value asked for."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where.lstrip('.') or 'the value'} {reason}")


def stable_text(value: Any) -> str:
    """`value` as text; raises Undescribable."""
    return _Encoder().text(value, "")


def code_parts(value: Any, name: str = "") -> dict[str, str]:
    """What `value` consists of, by path from `name`; raises Undescribable."""
    follower = _Follower()
    follower.follow(value, name)
    return follower.parts


def fingerprint(value: Any) -> str:
    """sha256 in hex of `code_parts`."""
    digest = hashlib.sha256()
    for path, text in code_parts(value).items():
        digest.update(f"{path}\0{text}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


UNDESCRIBABLE = "undescribable: "


def described(value: Any) -> Stable:
    """`stable_text` as a factor; text that occurs once, so that its key finds nothing, if none."""
    try:
        return Stable(stable_text(value))
    except Undescribable as error:
        return Stable(_once(error))


def described_code(value: Any) -> Parts:
    """`code_parts` as a factor; text that occurs once, so that its key finds nothing, if none."""
    try:
        return Parts(code_parts(value, "code"))
    except Undescribable as error:
        return Parts(code=_once(error))


def _once(error: Undescribable) -> str:
    return f"{UNDESCRIBABLE}{error} #{secrets.token_hex(8)}"


def function_text(function: types.FunctionType) -> str:
    """A function by name and code."""
    name = f"{function.__module__}.{function.__qualname__}"
    return f"{name} <code {code_digest(function.__code__)[:16]}>"


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


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


class _Encoder:
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
        if kind in _DATA:
            return repr(value)
        if isinstance(value, enum.Enum):
            return f"{class_name(kind)}.{value.name} = {self.text(value.value, where)}"
        if isinstance(value, type):
            return class_name(value)
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
        if isinstance(value, _OPAQUE_CLASSES) or class_name(kind) in _OPAQUE:
            return (
                f"{class_name(kind)} {getattr(value, 'name', '') or getattr(value, 'pattern', '')}"
            )
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


class _Follower(_Encoder):
    """Parts of code, by path. Each object is followed once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, str] = {}
        self._seen: dict[int, tuple[str, Any]] = {}  # kept alive so that ids are not reused

    def follow(self, value: Any, path: str) -> None:
        if type(value) in _DATA:
            self.parts[path] = repr(value)
        elif id(value) in self._seen:
            self.parts[path] = f"<as {self._seen[id(value)][0]}>"
        elif path.count(".") + path.count("[") > MAX_DEPTH:
            raise Undescribable(path, "is nested too deeply")
        else:
            self._seen[id(value)] = (path, value)
            for name, inner in self._inside(value, path):
                self.follow(inner, path + name)

    def _inside(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, types.FunctionType):
            yield from self._function(value, path)
        elif isinstance(value, type):
            yield from self._class(value, path)
        elif _is_tensor(value):
            self.parts[path] = f"{_tensor_text(value)} {_tensor_digest(value)}"
        elif type(value) is object:
            self.parts[path] = "<a sentinel>"
        elif (plain := self.plain(value, path)) is not None:
            self.parts[path] = plain
        elif isinstance(value, set | frozenset):
            self.parts[path] = self.text(value, path)
        elif _package(type(value)) == "triton":
            self.parts[path] = class_name(type(value))
            own = vars(value)
            yield from ((f".{name}", own[name]) for name in _TRITON_FIELDS if name in own)
        else:
            label, fields = decomposed(value, path)
            self.parts[path] = label
            if not isinstance(value, list | tuple | dict | types.MethodType | functools.partial):
                yield ".__class__", type(value)
            yield from fields

    def _function(self, function: types.FunctionType, path: str) -> Iterator[tuple[str, Any]]:
        self.parts[path] = function_text(function) + _version(function.__module__)
        if _version(function.__module__) and "<locals>" not in function.__qualname__:
            return
        code = function.__code__
        mutated = mutated_names(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                inner = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if name not in mutated:
                yield f".{name}", inner
        if function.__defaults__:
            yield ".__defaults__", function.__defaults__
        if function.__kwdefaults__:
            yield ".__kwdefaults__", function.__kwdefaults__
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            yield ".__wrapped__", wrapped
        if not _version(function.__module__):
            for name in sorted(global_names(code)):
                if name in function.__globals__ and name not in mutated:
                    yield from self._global(f".{name}", function, name)

    def _global(
        self, path: str, function: types.FunctionType, name: str
    ) -> Iterator[tuple[str, Any]]:
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            inner = vars(value)
            used = sorted(attribute_names(function.__code__))
            yield from ((f"{path}.{each}", inner[each]) for each in used if each in inner)
        elif isinstance(value, str) and (place := os.path.dirname(_file(function))):
            yield path, value.replace(place, "<directory>")  # a moved checkout is the same code
        else:
            yield path, value

    def _class(self, cls: type, path: str) -> Iterator[tuple[str, Any]]:
        version = _version(cls.__module__)
        self.parts[path] = class_name(cls) + version
        if not version:
            yield from ((f".__bases__[{i}]", base) for i, base in enumerate(cls.__bases__))
            yield from (
                (f".{name}", vars(cls)[name]) for name in sorted(filter(_own(cls), vars(cls)))
            )


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
    elif isinstance(value, _DATA):  # a subclass of a number or a string
        fields += [("()", next(b for b in kind.__mro__ if b in _DATA).__call__(value))]
    own = dict(_own_fields(value))
    fields += [(f".{name}", own[name]) for name in sorted(own)]
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
    own = getattr(value, "__self__", None)
    return own is not None and not isinstance(own, types.ModuleType | type)


def _own(cls: type) -> Callable[[str], bool]:
    """Whether a class's attribute was written in its body."""

    def own(name: str) -> bool:
        if name.startswith("_abc_"):
            return False
        return isinstance(unwrapped(vars(cls)[name]), types.FunctionType) or not name.startswith(
            "__"
        )

    return own


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


@functools.cache
def _version(module: str | None) -> str:
    """ " (package version)" for code whose package is known by its version; else empty."""
    package = (module or "").partition(".")[0]
    if package in _VERSIONED:
        return f" ({package})"
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if not any(folder in file for folder in _INSTALLED):
        return ""
    try:
        return f" ({package} {importlib.metadata.version(package)})"
    except importlib.metadata.PackageNotFoundError:
        stated = getattr(sys.modules[package], "__version__", None)
        return f" ({package} {stated})" if isinstance(stated, str) else ""


def _file(function: types.FunctionType) -> str:
    return str(function.__globals__.get("__file__") or "")


def _torch_text(value: Any) -> str | None:
    """Text of torch's own values, recognized by name so that torch need not be imported."""
    kind = type(value)
    if _package(kind) != "torch" and not _is_tensor(value) and not _is_module(value):
        return None
    if kind.__name__ in _TORCH_DATA:
        return str(value) if kind.__name__ != "Size" else f"torch.Size({list(value)})"
    if _is_tensor(value):
        return _tensor_text(value)
    if _is_module(value):
        return f"a {class_name(kind)}"
    if kind.__name__ in ("OpOverload", "OpOverloadPacket", "Library"):
        return f"{kind.__name__} {getattr(value, 'ns', value)}"
    return None


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _tensor_text(value: Any) -> str:
    strides = f" strides {tuple(value.stride())}" if not value.is_contiguous() else ""
    grad = " requires_grad" if value.requires_grad else ""
    kind = "" if class_name(type(value)) == "torch.Tensor" else f" {class_name(type(value))}"
    return f"{value.dtype}{list(value.shape)}{strides} {value.device.type}{grad}{kind}"


def _tensor_digest(value: Any) -> str:
    data = value.detach().cpu().contiguous().reshape(-1)
    torch = sys.modules["torch"]
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
