"""What a function or a value of the model can reach."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import logging
import types
from collections.abc import Collection
from enum import Enum
from typing import Any

import torch

from ...basics.frames import is_torch_file

PRIMITIVE = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, frozenset)
_LEAVES = (
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, torch.Tensor),
    *(Enum, functools._lru_cache_wrapper, logging.Logger, property, staticmethod, classmethod),
)
_LEAF_PACKAGES = ("torch", "typing", "re")
_SHOWN = (
    *(*CONTAINERS, types.MethodType, types.CellType, functools.partial),
    *(types.MappingProxyType, types.UnionType, types.GenericAlias),
)
"""Types in C of which the garbage collector knows all that they hold."""
_MOST_OBJECTS = 200
_IDENTITY = frozenset(("id", "hash", "__hash__"))
_STORING = ("RESUME", "LOAD_CONST", "STORE_ATTR", "RETURN_VALUE", "RETURN_CONST")


def knows_no_module(function: Any) -> bool:
    """Whether a function can reach no module but through its arguments, and asks for no identity.

    Dynamo reads globals and variables of enclosing functions once per trace, not once per region.
    """
    if isinstance(function, types.CodeType):
        return not _names_in(function) & _IDENTITY
    if not isinstance(function, types.FunctionType):
        return False
    if is_torch_file(function.__code__.co_filename):
        return True
    names, scope = _names_in(function.__code__), function.__globals__
    held = function.__closure__, function.__defaults__, function.__kwdefaults__
    return not names & _IDENTITY and all(
        map(reaches_only, (*held, *(scope[name] for name in names & {*scope})))
    )


def _names_in(code: types.CodeType) -> set[str]:
    """Names of globals and of attributes."""
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return {*code.co_names}.union(*map(_names_in, nested))


def reaches_only(
    value: Any, modules: Collection[torch.nn.Module] = (), seen: dict[int, Any] | None = None
) -> bool:
    """Whether `value` reaches no module but `modules`, and no function that tells an identity.

    `seen` collects all that it reaches, but not what a module holds.
    """
    seen = {} if seen is None else seen
    if id(value) in seen or isinstance(value, PRIMITIVE):
        return True
    seen[id(value)] = value
    if isinstance(value, torch.nn.Module):
        return any(value is module for module in modules)
    if value is id or value is hash or len(seen) > _MOST_OBJECTS:
        return False
    kind = type(value)
    if isinstance(value, _LEAVES) or kind.__module__.partition(".")[0] in _LEAF_PACKAGES:
        return True
    if not (isinstance(value, _SHOWN) or is_python_class(kind)):
        return False
    return all(reaches_only(inner, modules, seen) for inner in gc.get_referents(value))


def is_python_class(kind: type) -> bool:
    """Whether all that an object of a class holds is in its `__dict__` and in slots."""
    heap_type = 1 << 9
    return all(
        base in (object, types.SimpleNamespace)
        or (base.__flags__ & heap_type and (base.__dictoffset__ or "__slots__" in vars(base)))
        for base in kind.__mro__
    )


def only_stores(kind: Any) -> bool:
    """Whether an object of a class only stores what it is made of, in plain attributes."""
    init = inspect.getattr_static(kind, "__init__")
    if not isinstance(init, types.FunctionType) or hasattr(kind, "__getattr__"):
        return False
    steps = {step.opname for step in dis.get_instructions(init)}
    return (
        type(kind).__call__ is type.__call__
        and all(
            getattr(kind, name) is getattr(object, name)
            for name in ("__new__", "__setattr__", "__getattribute__")
        )
        and all(step in _STORING or step.startswith("LOAD_FAST") for step in steps)
        and not any(hasattr(kind, name) for name in init.__code__.co_names)
    )
