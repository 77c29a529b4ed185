"""Python values of a model that tracing may bake in, as plain data for the trace key.

The attributes of every submodule, its hooks, and the objects behind them are followed to DEPTH;
what lies deeper, or outside the model, is recorded by the trace itself (see `reads`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch

from ...cache.keys.code_fingerprint import fingerprint
from ...torch_compat.modules import forward_hooks, global_forward_hooks

DEPTH = 6
"""How deep an attribute of a module is followed; configuration objects are seldom deeper than 3."""

_INHERITED = frozenset(vars(torch.nn.Module()))


def module_attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Class, mode, plain attributes and hooks of every submodule, by its name."""
    described = _Describer()
    return {
        name: {
            "class": _named(type(module)),
            "training": module.training,
            **{k: described(v, DEPTH) for k, v in sorted(vars(module).items()) if _own(k)},
            **{kind: described(hooks, DEPTH) for kind, hooks in forward_hooks(module).items()},
        }
        for name, module in model.named_modules()
    } | {"global hooks": described(global_forward_hooks(), DEPTH)}


def described(value: Any) -> Any:
    """A stable stand-in for any Python value, as for an attribute."""
    return _Describer()(value, DEPTH)


def _own(name: str) -> bool:
    return name not in _INHERITED


class _Describer:
    """Stable stand-ins for attributes; a function that many modules share is hashed once."""

    def __init__(self) -> None:
        self._functions: dict[int, str] = {}

    def __call__(self, value: Any, depth: int) -> Any:
        """`value` itself if it is data, else its class and content."""
        match value:
            case None | bool() | int() | str():
                return value
            case float() | complex() | bytes():
                return repr(value)
            case Enum():
                return f"{type(value).__qualname__}.{value.name}"
            case torch.Tensor():
                return [str(value.dtype), list(value.shape)]
            case torch.nn.Module():
                return _named(type(value))
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                return str(value)
            case type():
                return _named(value)
            case types.FunctionType() | types.MethodType() | partial():
                return self._function(value)
        if inspect.isroutine(value):
            return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        return self._content(value, depth) if depth else _named(type(value))

    def _content(self, value: Any, depth: int) -> Any:
        match value:
            case list() | tuple():
                return [self(item, depth - 1) for item in value]
            case set() | frozenset():
                return sorted(repr(self(item, depth - 1)) for item in value)
            case Mapping():
                return [[self(k, depth - 1), self(v, depth - 1)] for k, v in value.items()]
        fields = {name: self(item, depth - 1) for name, item in sorted(_fields(value))}
        return [_named(type(value)), fields] if fields else _named(type(value))

    def _function(self, function: Callable[..., Any]) -> str:
        """Its name, and its code with what it closes over; torch's own are known by version."""
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        if name.startswith("torch."):
            return name
        if id(function) not in self._functions:
            self._functions[id(function)] = f"{name} {fingerprint(function)}"
        return self._functions[id(function)]


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Instance attributes, those in slots included."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield name, getattr(value, name)


def _named(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
