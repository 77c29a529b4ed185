"""What a trace read outside the model: globals, class attributes, contents of closures.

Dynamo guards on every Python value that it baked in, and names each by an expression such as
`G['SCALE']` or `dict(type(L['self']).__dict__)['factor']`. What the trace key cannot know, since
it is made without a trace, is recorded in the bundle as (module, path, value) and looked at again
on a warm start: by attribute access alone, nothing stored is evaluated.
"""

from __future__ import annotations

import ast
import enum
import hashlib
import inspect
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...cache.keys.code_fingerprint import code_digest
from ...cache.keys.factors import Json, is_place
from .module_state import DEPTH

Place = tuple[str, tuple[Any, ...]]
"""A module's name and steps from there: attributes, and keys or positions as one-element lists.

The name is empty for the model itself."""

_SIZED = {"SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK", "DICT_KEYS"}
"""Kinds of guards that are about a container's length or keys, not only about its type."""


def reads(
    guarded: Iterable[tuple[str, str]],
    model: torch.nn.Module,
    scope: Mapping[str, Any],
    aliases: Mapping[str, str],
) -> list[Json]:
    """The places that guards are on, with their values, each as [module, path, value].

    `guarded` are (expression, kind of guard); `scope` has `L`, the arguments of the call, and `G`,
    the globals of the traced function; `aliases` are Dynamo's names for modules in `G`.
    """
    found: dict[str, Json] = {}
    for expression, kind in guarded:
        place = _Locator(model, scope, aliases).place(expression)
        if place is None or _is_in_key(place):
            continue
        value = _resolve(place, model)
        if described := _sized(value) if kind in _SIZED else _described(value):
            found[f"{place} {described}"] = [place[0], list(place[1]), described]
    return [found[text] for text in sorted(found)]


def _is_in_key(place: Place) -> bool:
    """Torch is a factor by its version, and the attributes of modules are, down to DEPTH."""
    module, path = place
    if module:
        return module.partition(".")[0] == "torch"
    submodules = [i for i, step in enumerate(path) if step == "_modules"]
    return len(path) - (submodules[-1] + 2 if submodules else 0) <= 1 + DEPTH


def changed_read(recorded: Iterable[Any], model: torch.nn.Module) -> str | None:
    """The first recorded place that has another value now, in words; None if there is none."""
    for module, path, value in recorded:
        if module and module not in sys.modules:
            continue  # not imported yet, so nobody has changed what its source says
        now = _resolve((module, tuple(path)), model)
        if value not in (_described(now), _sized(now)):
            return f"{_spelled(module, path)} is {_described(now)} and was {value}"
    return None


def _resolve(place: Place, model: torch.nn.Module) -> Any:
    """The value at a place; `_MISSING` if there is none any more."""
    value: Any = sys.modules[place[0]] if place[0] else model
    for step in place[1]:
        try:
            value = value[step[0]] if isinstance(step, list) else _attribute(value, step)
        except (AttributeError, LookupError, TypeError):
            return _MISSING
    return value


def _attribute(value: Any, name: str) -> Any:
    return inspect.getattr_static(value, name) if isinstance(value, type) else getattr(value, name)


class _Missing:
    """Stands for a value that is no longer there."""


_MISSING = _Missing()


def _described(value: Any) -> str | None:
    """A value in words that last from one process to the next; None for what is not compared."""
    match value:
        case enum.Enum():
            return f"{type(value).__qualname__}.{value.name}"
        case str() if is_place(value):
            return "a place"
        case None | bool() | int() | float() | complex() | str() | bytes():
            return repr(value)
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return str(value)
        case staticmethod() | classmethod():
            return _described(value.__func__)
        case types.FunctionType():
            return f"{value.__module__}.{value.__qualname__} {code_digest(value.__code__)[:16]}"
        case type():
            return f"{value.__module__}.{value.__qualname__}"
        case torch.Tensor() | torch.nn.Module() | types.ModuleType():
            return None
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _sized(value: Any) -> str | None:
    """As `_described`, with the length of a sequence and the keys of a dict."""
    if isinstance(value, Mapping):
        keys = repr([_described(key) for key in value])
        return f"{_described(value)} {hashlib.sha256(keys.encode()).hexdigest()[:16]}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"{_described(value)} of {len(value)}"
    return _described(value)


def _spelled(module: str, path: Iterable[Any]) -> str:
    return (module or "the model") + "".join(
        f"[{s[0]!r}]" if isinstance(s, list) else f".{s}" for s in path
    )


class _Locator:
    """Reads one expression of Dynamo's: the value it names, and where that is reached from."""

    def __init__(
        self, model: torch.nn.Module, scope: Mapping[str, Any], aliases: Mapping[str, str]
    ) -> None:
        self._model = model
        self._scope = scope
        self._aliases = aliases

    def place(self, expression: str) -> Place | None:
        """None for arguments, which steps check, and for forms that are not understood."""
        try:
            return self._find(ast.parse(expression, mode="eval").body)[1]
        except (SyntaxError, LookupError, AttributeError, TypeError):
            return None

    def _find(self, node: ast.AST) -> tuple[Any, Place | None]:
        value, place = self._step(node)
        if isinstance(value, types.ModuleType):
            return value, (value.__name__, ())
        if isinstance(value, type) and "<locals>" not in value.__qualname__:
            return value, (value.__module__, tuple(value.__qualname__.split(".")))
        return value, place

    def _step(self, node: ast.AST) -> tuple[Any, Place | None]:
        match node:
            case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=name)):
                argument = self._scope["L"][name]
                return argument, ("", ()) if argument is self._model else None
            case ast.Subscript(value=ast.Name(id="G"), slice=ast.Constant(value=name)):
                return self._global(str(name))
            case ast.Call(func=ast.Name(id="type"), args=[inner]):
                return type(self._find(inner)[0]), None
            case ast.Call(
                func=ast.Name(id="dict"), args=[ast.Attribute(value=inner, attr="__dict__")]
            ):
                return self._find(inner)  # `dict(cls.__dict__)`: its keys are attributes of cls
            case ast.Subscript(value=inner, slice=ast.Constant(value=str() | int() as key)):
                base, place = self._find(inner)
                if isinstance(base, type):
                    return vars(base)[str(key)], _then(place, key)
                return base[key], _then(place, [key])
            case ast.Attribute(value=inner, attr=name):
                base, place = self._find(inner)
                return getattr(base, name), _then(place, name)
        raise LookupError(ast.dump(node))

    def _global(self, name: str) -> tuple[Any, Place | None]:
        if name in self._aliases:
            return sys.modules[self._aliases[name]], None
        if name.startswith("__builtins_dict__"):
            raise LookupError(name)  # put there by Dynamo
        globals_ = self._scope["G"]
        return globals_[name], (globals_["__name__"], (name,))


def _then(place: Place | None, step: Any) -> Place | None:
    return None if place is None else (place[0], (*place[1], step))
