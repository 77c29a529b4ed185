"""The kinds of conditions: what each observes of a value, and which guards of Dynamo become one.

A new kind is one entry in `KINDS`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...torch_compat.basics.facts import CALLED, FALLBACK
from ...torch_compat.basics.frames import is_torch_file
from ..ir.serialization import decode
from .bytecode import with_nested
from .code import bound_text, code_parts, function_with_values
from .custom_ops import op_parts, op_signature
from .places import HOOKS, MISSING, key_of
from .values import VERSIONED, Undescribable, package_of, stable_text, unwrapped

Observation: TypeAlias = "str | dict[str, str]"
"""What a condition compares: a text, or the text of each part."""

TYPE, VALUE, IDENTITY = "type", "value", "identity"
CALLED_OP, INLINED_OP, FUNCTION = "called op", "op", "function"

_NATIVE = {
    *(type, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.ClassMethodDescriptorType, types.MemberDescriptorType),
}


@dataclass(frozen=True)
class Kind:
    """One kind of condition."""

    observe: Callable[[Any, Any], Observation]
    """What is observed of a value, with the argument of the condition; raises Undescribable."""
    guards: tuple[str, ...] = ()
    """Kinds of Dynamo's guards that become this condition."""
    is_shown: bool = False
    """Whether a difference states the kind after the place. Of others it states the argument."""


def _code(value: Any, _: Any) -> str:
    function = unwrapped(value)
    is_function = isinstance(function, types.FunctionType)
    return function_with_values(function) if is_function else stable_text(value)


def _added(value: Any, names: Sequence[str]) -> str:
    """Definitions under `names`, and operators, that code outside torch added.

    Dynamo guards neither builtins nor methods of tensors nor metaclasses. A native function is
    known by its name, a Python function of torch by its line and defaults.
    """
    read = frozenset(names)
    definitions: dict[str, str] = {}
    if not isinstance(value, type):
        for name in names:
            if (held := vars(value).get(name, MISSING)) is not MISSING:
                definitions |= _definition(name, held, is_read=True)
        return stable_text(definitions)
    apart = () if value is torch.Tensor else torch.Tensor.__mro__  # has a condition of its own
    for holder in reversed([cls for cls in value.__mro__ if cls not in apart]):
        for name, held in vars(holder).items():
            if name in read or (name[:2] == "__" and not _is_of_torch(held)):
                definitions |= _definition(name, held, name in read)
    return stable_text(definitions)


def _is_of_torch(value: Any) -> bool:
    """Whether a definition is native code, or a function of torch.

    Hot: called thousands of times per start.
    """
    kind = type(value)
    return kind in _NATIVE or (
        kind is types.FunctionType and is_torch_file(value.__code__.co_filename)
    )


def _definition(name: str, value: Any, is_read: bool) -> dict[str, str]:
    """What is stated of a definition, by part."""
    if type(value) in _NATIVE:
        other = getattr(value, "__name__", name)
        return {name: other} if other != name else {}
    function = unwrapped(value)
    if not isinstance(function, types.FunctionType):
        return {name: bound_text(value)} if is_read else {}
    code = function.__code__
    if not is_torch_file(code.co_filename):
        return code_parts(function, name)
    line = f"{code.co_qualname} {code.co_firstlineno} {bound_text(function.__defaults__)}"
    return {name: line} if is_read else {}


def _attribute(cls: Any, name: str) -> str:
    """What a class has under a name, without calling descriptors; of an object all it holds."""
    held = unwrapped(inspect.getattr_static(cls, name, MISSING))
    if held is MISSING:
        return "missing"
    is_versioned = package_of(type(held)) in VERSIONED
    return bound_text(held) if is_versioned else stable_text(code_parts(held, name))


def _has_own(value: Any, name: str) -> str:
    """Whether a value or its class has an attribute without `__getattr__`; runs no code of it.

    Hot: each weight and module that a forward names is answered by that of `nn.Module`.
    """
    own: Any = ()
    with suppress(AttributeError):
        own = object.__getattribute__(value, "__dict__")
    classes = (*type(value).__mro__, *(value.__mro__ if isinstance(value, type) else ()))
    return str(name in own or any(name in vars(each) for each in classes))


def _calls_inside(function: Any, index: int) -> str:
    """What a function inside of another, which makes it, consists of, and all that it reads."""
    outer = unwrapped(function)
    code = [*with_nested(outer.__code__)][index]
    cells = tuple(types.CellType() for _ in code.co_freevars)  # what it holds has conditions
    return stable_text(code_parts(types.FunctionType(code, outer.__globals__, closure=cells)))


def _result(function: Any, arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> str:
    """What a function returns that Dynamo called while tracing, and that a start calls again."""
    positional, named = arguments
    try:
        given = {name: decode(value) for name, value in named.items()}
        return stable_text(function(*map(decode, positional), **given))
    except Undescribable:
        raise
    except Exception as error:  # no process group, …
        return f"raises {type(error).__name__}"


KINDS: Mapping[str, Kind] = {
    # Numbers of classes and objects are added in conditions.py, where several places are observed.
    TYPE: Kind(lambda value, _: stable_text(type(value)), ("TYPE_MATCH", "NN_MODULE"), True),
    VALUE: Kind(lambda value, _: stable_text(value)),
    IDENTITY: Kind(lambda value, _: ""),
    "length": Kind(lambda value, _: f"{len(value)} items", ("SEQUENCE_LENGTH",), True),
    "truth": Kind(lambda value, _: str(len(value) > 0)),
    "keys": Kind(
        lambda value, _: f"keys {[stable_text(key) for key in value]}",
        ("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK", "DICT_KEYS", "ITERATED"),
        True,
    ),
    "contains": Kind(
        lambda value, key: str(key_of(key) in value),
        ("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"),
    ),
    "isinstance": Kind(lambda value, cls: str(isinstance(value, key_of(cls)))),
    "issubclass": Kind(lambda value, cls: str(issubclass(value, key_of(cls)))),
    "hasattr": Kind(lambda value, name: str(hasattr(value, name)), ("HASATTR",)),
    "in __dict__": Kind(
        lambda value, name: str(name in getattr(value, "__dict__", ())),
        ("NOT_PRESENT_IN_GENERIC_DICT",),
    ),
    "has its own": Kind(_has_own, (FALLBACK,)),
    "hooks": Kind(lambda value, _: f"{sum([len(getattr(value, h, ())) for h in HOOKS])} hooks"),
    "code": Kind(_code),
    "added": Kind(_added, is_shown=True),
    "result": Kind(_result, is_shown=True),
    "names": Kind(
        lambda value, names: stable_text([n for n in names if n in vars(value)]), is_shown=True
    ),
    "attribute": Kind(_attribute),
    "calls": Kind(lambda value, _: stable_text(code_parts(unwrapped(value))), (CALLED,), True),
    "calls inside": Kind(_calls_inside, is_shown=True),
    "members": Kind(
        lambda value, _: stable_text([[n, m.value] for n, m in value.__members__.items()]),
        is_shown=True,
    ),
    "exists": Kind(lambda value, _: str(value is not None), ("WEAKREF_ALIVE", "NOT_NONE_MATCH")),
    CALLED_OP: Kind(lambda op, _: op_signature(op)),
    INLINED_OP: Kind(lambda op, _: op_parts(op)),
    FUNCTION: Kind(lambda function, _: code_parts(function)),
}

_OF_GUARD = {guard: name for name, kind in KINDS.items() for guard in kind.guards}


def kind_of_guard(guard: str) -> str:
    """The kind of condition that a guard of Dynamo becomes: by default its value is observed."""
    return _OF_GUARD.get(guard, VALUE)
