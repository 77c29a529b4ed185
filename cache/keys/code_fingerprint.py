"""Fingerprints of code, by what it does and not by where it lies.

A function is hashed by its compiled code, which is what runs: text on the disk may have been
edited since the import, and moving a function or editing a comment near it changes nothing.
Followed from there: the functions, classes and constants it names, as long as they belong to the
same top-level package; other packages are factors by their version. Lists and dicts count as
constants if their name is in capitals, and as state, which is no factor, otherwise.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .factors import Json, canonical, is_place

_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)


def fingerprint(function: Callable[..., Any]) -> str:
    """sha256 in hex of a function, method, class, partial or Triton kernel and what it calls."""
    root: Any = function
    while isinstance(root, functools.partial):
        root = root.func
    walk = _Walk(_package(_unwrapped(root)))
    walk.follow(function)
    return hashlib.sha256(canonical(walk.parts)).hexdigest()


@dataclass(slots=True)
class _Walk:
    """One traversal from a function: `parts` is what is hashed, in order of discovery."""

    package: str
    parts: list[Json] = field(default_factory=list)
    seen: dict[int, tuple[int, Any]] = field(default_factory=dict)  # objects kept for their ids

    def follow(self, value: Any) -> None:
        value = _unwrapped(value)
        if _is_constant(value):
            self.parts.append(_constant(value))
        elif id(value) in self.seen:
            self.parts.append(["again", self.seen[id(value)][0]])
        else:
            self.seen[id(value)] = (len(self.seen), value)
            self.parts.append([type(value).__qualname__, getattr(value, "__qualname__", "")])
            for name, inner in _inside(value, self.package):
                self.parts.append(name)
                self.follow(inner)


def _inside(value: Any, package: str) -> Iterator[tuple[str, Any]]:
    """What a value consists of, by name; nothing for what another package made."""
    if isinstance(value, list | tuple):
        yield from ((str(i), item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from sorted((str(name), item) for name, item in value.items())
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif _package(value) != package:
        return
    elif isinstance(value, types.FunctionType):
        yield from (("code", code_digest(value.__code__)), ("defaults", value.__defaults__))
        yield from (("keyword defaults", value.__kwdefaults__), *_named_by(value))
    elif isinstance(value, type):
        yield ("bases", value.__bases__)
        yield from sorted((n, v) for n, v in vars(value).items() if _is_own(n, v))


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The closure's cells and the globals that a function's code names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    names, stored = sorted(_names(function.__code__)), _stored_globals(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            inner = vars(value)
            yield from ((f"{name}.{n}", inner[n]) for n in names if n in inner)
        elif not _is_state(name, value, stored):
            yield name, value


def _is_state(name: str, value: Any, stored: set[str]) -> bool:
    """Whether a global varies while the program runs: a memo, a registry, a counter."""
    if isinstance(value, list | dict | set):
        return not name.isupper()
    return name in stored


def _names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*map(_names, _nested(code)))


def _stored_globals(code: types.CodeType) -> set[str]:
    steps = dis.get_instructions(code)
    stored = {str(step.argval) for step in steps if step.opname == "STORE_GLOBAL"}
    return stored.union(*map(_stored_globals, _nested(code)))


def _nested(code: types.CodeType) -> list[types.CodeType]:
    return [const for const in code.co_consts if isinstance(const, types.CodeType)]


def code_digest(code: types.CodeType) -> str:
    """Digest of what a code object does: no file name, no line numbers."""
    facts: list[Json] = [
        code.co_code.hex(),
        code.co_exceptiontable.hex(),
        [_constant(const) for const in code.co_consts],
        [list(code.co_names), list(code.co_varnames)],
        [list(code.co_freevars), list(code.co_cellvars)],
        [code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount],
    ]
    return hashlib.sha256(canonical(facts)).hexdigest()


def _constant(value: Any) -> Json:
    """A constant of a code object or a module, without a trace of hash order or place."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return ["frozenset", *sorted((_constant(item) for item in value), key=canonical)]
    if isinstance(value, tuple):
        return ["tuple", *(_constant(item) for item in value)]
    if isinstance(value, str) and is_place(value):
        return "<a place>"
    return f"{type(value).__qualname__}:{value!r}"


def _is_constant(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, tuple | frozenset) and all(map(_is_constant, value))
    )


def _is_own(name: str, member: Any) -> bool:
    """Whether a class's attribute is of the class's own making."""
    return isinstance(_unwrapped(member), types.FunctionType) or not name.startswith("__")


def _unwrapped(value: Any) -> Any:
    """The function inside a property, a method or a kernel object (Triton keeps it as `fn`)."""
    while not isinstance(value, types.FunctionType | type):
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", None)
        inner = inner or getattr(value, "__dict__", {}).get("fn")
        if inner is None:
            break
        value = inner
    return value


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]
