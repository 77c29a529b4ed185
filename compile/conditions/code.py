"""What code consists of: what a function is, what it has bound, and all that it reads, by part.

`function_with_values` states a function with what is bound to it. `code_parts` follows closures,
defaults, the globals that a function names, what it imports, methods and base classes of a value as
well. Of a module it follows what any of this code names. An installed package is a part by its
version; the interpreter and torch are versions in every key, and their code is not followed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from ...cache.keys import environment
from .bytecode import (
    attribute_names,
    global_names,
    imports,
    mutated_names,
    probed_names,
    variables_read,
    written_parts,
)
from .values import (
    DATA,
    MAX_DEPTH,
    VERSIONED,
    Undescribable,
    class_name,
    decomposed,
    function_text,
    package_named,
    package_of,
    plain_text,
    stable_text,
    tensor_digest,
    tensor_text,
    unwrapped,
)

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TRITON_FIELDS = ("fn", "configs", "keys", "values", "noinline", "do_not_specialize")
_WITHOUT_CLASS = (list, tuple, dict, types.MethodType, functools.partial)
"""Types of values whose class has no code of a user's."""
_CODE = (types.FunctionType, type, types.ModuleType)


def closure_values(function: types.FunctionType) -> dict[str, Any]:
    """The variables of enclosing functions that a function uses, those that have a value."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            continue
    return values


def function_with_values(function: types.FunctionType, outer: tuple[int, ...] = ()) -> str:
    """A function with its defaults and closure, which Dynamo does not guard where it makes objects.

    It guards the objects in them: of those only the class is stated.
    """
    varying = mutated_names(function.__code__) if function.__closure__ else ()
    bound = {"defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__}
    for name, value in closure_values(function).items():
        bound[name] = None if name in varying else value
    outer = (*outer, id(function))
    texts = [f"{k}={bound_text(v, outer)}" for k, v in bound.items() if v is not None]
    return function_text(function) + (f" with {', '.join(texts)}" if texts else "")


def bound_text(value: Any, outer: tuple[int, ...] = ()) -> str:
    """A value that is bound to a function: containers by content, other objects by class."""
    if id(value) in outer or len(outer) > MAX_DEPTH:
        return "..."
    if isinstance(value, types.FunctionType):
        return function_with_values(value, outer)
    outer = (*outer, id(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(bound_text(item, outer) for item in value)}]"
    if isinstance(value, dict):
        return bound_text(list(value.items()), outer)
    try:
        is_set = isinstance(value, set | frozenset)
        text = stable_text(value) if is_set else plain_text(value)
    except Undescribable:
        text = None
    return class_name(type(value)) if text is None else text


def code_parts(value: Any, name: str = "") -> dict[str, str]:
    """What `value` consists of, by path from `name`; raises Undescribable."""
    follower = _Follower()
    follower.follow(value, name)
    follower.follow_modules()
    return follower.parts


def fingerprint(value: Any) -> str:
    """sha256 in hex of `code_parts`."""
    digest = hashlib.sha256()
    for path, text in code_parts(value).items():
        digest.update(f"{path}\0{text}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


class _Follower:
    """Parts of code, by path. Each object is followed once."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self._seen: dict[int, tuple[str, Any]] = {}  # kept alive so that ids are not reused
        self._written: set[str] = set()
        """Paths of what the code itself writes to."""
        self._functions: list[types.FunctionType] = []
        self._reached: dict[str, types.ModuleType] = {}

    def follow(self, value: Any, path: str) -> None:
        if path in self._written:
            return
        if type(value) in DATA:
            self.parts[path] = repr(value)
        elif id(value) in self._seen:
            self.parts[path] = f"<as {self._seen[id(value)][0]}>"
        elif path.count(".") + path.count("[") > MAX_DEPTH:
            raise Undescribable(path, "is nested too deeply")
        else:
            self._seen[id(value)] = (path, value)
            for name, inner in self._inside(value, path):
                self.follow(inner, path + name)

    def follow_modules(self) -> None:
        """Follow what the code names of each module that it reaches in any way."""
        size = 0
        while self._reached and size < len(self.parts):
            size = len(self.parts)
            self._follow_named(_CODE)  # before data, which this code may write
            self._follow_named(object)

    def _follow_named(self, kind: Any) -> None:
        functions = [*self._functions]
        for path, module in [*self._reached.items()]:
            held = vars(module)
            for function in functions:
                if function.__globals__ is held:
                    self._written |= {f"{path}.{w}" for w in written_parts(function.__code__)}
            for code in (function.__code__ for function in functions):
                for name in sorted((attribute_names(code) | probed_names(code)) & held.keys()):
                    place = f"{path}.{name}"
                    if (
                        isinstance(held[name], kind)
                        and name[:2] != "__"
                        and place not in self.parts
                    ):
                        for inner, value in _global(place, code, held, name):
                            self.follow(value, inner)

    def _inside(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, types.FunctionType):
            yield from self._function(value, path)
        elif isinstance(value, type):
            yield from self._class(value, path)
        elif isinstance(value, torch.Tensor):
            self.parts[path] = f"{tensor_text(value)} {tensor_digest(value)[:16]}"
        elif type(value) is object:
            self.parts[path] = "<a sentinel>"
        elif isinstance(value, types.ModuleType):
            version = _version(value.__name__)
            self.parts[path] = f"module {value.__name__}{version}"
            if not version:
                self._reached[path] = value
        elif (text := plain_text(value, path)) is not None:
            self.parts[path] = text
        elif type(value) in (set, frozenset):
            self.parts[path] = stable_text(value, path)
        elif package_of(type(value)) == "triton":
            self.parts[path] = class_name(type(value))
            fields = vars(value)
            yield from ((f".{name}", fields[name]) for name in _TRITON_FIELDS if name in fields)
        else:
            self.parts[path], inner = decomposed(value, path)
            if type(value) not in _WITHOUT_CLASS:
                yield ".__class__", type(value)
            yield from inner

    def _function(self, function: types.FunctionType, path: str) -> Iterator[tuple[str, Any]]:
        # its `__module__` may be that of a function it wraps
        version = _version(str(function.__globals__.get("__name__") or function.__module__))
        self.parts[path] = function_text(function) + version
        # a wrapper of an installed package may have the names of the user's function
        wraps_users = not _version(str(function.__module__))
        name = function.__code__.co_qualname if wraps_users else function.__qualname__
        if version and "<locals>" not in name:
            return
        self._written |= {f"{path}.{written}" for written in written_parts(function.__code__)}
        yield from ((f".{name}", value) for name, value in closure_values(function).items())
        if function.__defaults__:
            yield ".__defaults__", function.__defaults__
        if function.__kwdefaults__:
            yield ".__kwdefaults__", function.__kwdefaults__
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            yield ".__wrapped__", wrapped
        if not version:
            self._functions.append(function)
            for name in sorted(global_names(function.__code__) & function.__globals__.keys()):
                yield from _global(f".{name}", function.__code__, function.__globals__, name)
            yield from _imported(function)

    def _class(self, cls: type, path: str) -> Iterator[tuple[str, Any]]:
        version = _version(cls.__module__)
        self.parts[path] = class_name(cls) + version
        if not version:
            if type(cls) is not type:
                yield ".__class__", type(cls)
            yield from ((f".__bases__[{i}]", base) for i, base in enumerate(cls.__bases__))
            yield from (
                (f".{name}", vars(cls)[name]) for name in sorted(vars(cls)) if _is_own(cls, name)
            )


def _global(
    path: str, code: types.CodeType, scope: dict[str, Any], name: str
) -> Iterator[tuple[str, Any]]:
    value = scope[name]
    if isinstance(value, types.ModuleType):
        yield from _module(path, code, value)
    elif type(value) is str and (folder := os.path.dirname(str(scope.get("__file__") or ""))):
        yield path, value.replace(folder, "<directory>")  # a moved checkout is the same code
    else:
        yield from _read(path, code, name, value)


def _module(path: str, code: types.CodeType, module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """A module; of one that is installed or lazy what the code reads of it."""
    if type(module) is types.ModuleType and not _version(module.__name__):
        yield path, module
    else:
        for attribute, inner in _attributes(module, attribute_names(code)):
            yield from _read(f"{path}.{attribute}", code, attribute, inner)


def _imported(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function imports when it runs; of installed packages the version, without importing
    them."""
    for name, level, names in imports(function.__code__):
        path = f".import {'.' * level}{name}"
        version = "" if level else _version(name)
        if version and package_named(name) not in sys.stdlib_module_names:
            yield path, version
            continue
        try:
            module = __import__(name, function.__globals__, None, names, level)
        except (Exception, SystemExit):  # of a module of the user's
            yield path, "cannot be imported"
        else:
            yield from _module(path, function.__code__, module)


def _attributes(module: types.ModuleType, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Those of the `names` that a module has, sorted."""
    # a lazy one, as `torch.ops.aten`, has in `vars` what the process has read of it before
    is_lazy = type(module) is not types.ModuleType
    for name in sorted(names if is_lazy else names & vars(module).keys()):
        with suppress(Exception):  # of a lazy one: what it would import may fail in any way
            yield name, getattr(module, name)


def _read(path: str, code: types.CodeType, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What code reads of a value; of the environment the variables, all if one is computed."""
    if not any(value is reader for reader in environment.READERS):
        yield path, value
    elif (names := variables_read(code, name)) is None:
        yield path, dict(environment.VARIABLES)
    else:
        yield from ((f"{path}[{read!r}]", environment.observed(read)) for read in sorted(names))


def _is_own(cls: type, name: str) -> bool:
    """Whether an attribute was written in the body of the class."""
    if name.startswith("_abc_"):
        return False
    return isinstance(unwrapped(vars(cls)[name]), types.FunctionType) or not name.startswith("__")


@functools.cache
def _version(module: str) -> str:
    """ " (package version)" for code whose package is known by its version; else empty."""
    package = package_named(module)
    if package in VERSIONED:
        return f" ({package})"
    loaded, spec = sys.modules.get(package), None
    if loaded is None and package:
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(package)
    file = getattr(loaded, "__file__", None) or getattr(spec, "origin", None) or ""
    if not any(folder in file for folder in _INSTALLED):
        return ""
    try:
        return f" ({package} {importlib.metadata.version(package)})"
    except importlib.metadata.PackageNotFoundError:
        stated = getattr(loaded, "__version__", None)
        return f" ({package} {stated})" if isinstance(stated, str) else ""
