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
_IDENTITY = ("id", "hash", "__hash__")
_LEAVES = (
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, torch.Tensor),
    *(Enum, functools._lru_cache_wrapper, logging.Logger, property, staticmethod, classmethod),
)
_SHOWN = (types.MappingProxyType, types.UnionType, types.GenericAlias)
"""Types in C of which the garbage collector knows all that they hold."""
_LEAF_PACKAGES = ("torch", "typing", "re")
_MOST_OBJECTS = 200
_STORING = ("RESUME", "LOAD_CONST", "STORE_ATTR", "RETURN_VALUE", "RETURN_CONST")


def knows_no_module(function: Any) -> bool:
    """Whether a function can reach no module but through its arguments, and asks for no identity.

    Dynamo reads globals and variables of enclosing functions once per trace, not once per region.
    """
    if isinstance(function, types.CodeType):
        return not _names_of(function) & {*_IDENTITY}
    if not isinstance(function, types.FunctionType):
        return False
    code, known = function.__code__, function.__globals__
    if is_torch_file(code.co_filename):
        return True
    names = _names_of(code)
    if names & {*_IDENTITY}:
        return False
    cells = map(_content, function.__closure__ or ())
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    if not all(map(is_without_modules, (*cells, *defaults))):
        return False
    suspects = {each for each in names & {*known} if not is_without_modules(known[each])}
    return not suspects or not suspects & _globals_of(code)  # a name may be an attribute's


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _names_of(code: types.CodeType) -> set[str]:
    nested = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return {*code.co_names}.union(*map(_names_of, nested))


def _globals_of(code: types.CodeType) -> set[str]:
    """Names of the globals that code reads."""
    nested = (each for each in code.co_consts if isinstance(each, types.CodeType))
    reads = "LOAD_GLOBAL", "LOAD_NAME"
    own = {each.argval for each in dis.get_instructions(code) if each.opname in reads}
    return own.union(*map(_globals_of, nested))


def is_without_modules(
    value: Any,
    seen: dict[int, Any] | None = None,
    known: Collection[torch.nn.Module] = (),
) -> bool:
    """Whether no module but `known` ones, and no means to ask for an identity, can be reached from
    a value. `seen` collects what can be, but not what a module holds."""
    seen = {} if seen is None else seen
    if id(value) in seen or isinstance(value, PRIMITIVE):
        return True
    seen[id(value)] = value
    if isinstance(value, torch.nn.Module):
        return any(value is each for each in known)
    if value is id or value is hash or len(seen) > _MOST_OBJECTS:
        return False
    kind = type(value)
    if isinstance(value, _LEAVES) or kind.__module__.partition(".")[0] in _LEAF_PACKAGES:
        return True
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    elif isinstance(value, CONTAINERS):
        inside = list(value)
    elif isinstance(value, types.MethodType):
        inside = [value.__self__]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif kind in _SHOWN or is_python_class(kind):
        inside = gc.get_referents(value)
    else:
        return False
    return len(seen) < _MOST_OBJECTS and all(
        is_without_modules(each, seen, known) for each in inside
    )


def is_python_class(kind: type) -> bool:
    """Whether all that an object of a class holds is in its `__dict__` and in slots."""
    heap_type = 1 << 9
    return all(
        each in (object, types.SimpleNamespace)
        or (each.__flags__ & heap_type and (each.__dictoffset__ or "__slots__" in vars(each)))
        for each in kind.__mro__
    )


def only_stores(kind: Any) -> bool:
    """Whether an object of a class only stores what it is made of, in plain attributes."""
    init = inspect.getattr_static(kind, "__init__")
    if not isinstance(init, types.FunctionType):
        return False
    steps = {each.opname for each in dis.get_instructions(init)}
    return (
        type(kind).__call__ is type.__call__
        and kind.__new__ is object.__new__
        and kind.__setattr__ is object.__setattr__
        and kind.__getattribute__ is object.__getattribute__
        and not hasattr(kind, "__getattr__")
        and all(each in _STORING or each.startswith("LOAD_FAST") for each in steps)
        and not any(hasattr(kind, name) for name in init.__code__.co_names)
    )
