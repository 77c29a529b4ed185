"""Python values as JSON and back: everything a plan contains besides references to tensors.

Every value that an FX graph passes to an op survives the round trip: non-finite floats, complex
numbers, slices, tuples, devices, dtypes, layouts, memory formats and enum members. Dataclasses and
named tuples of a model's result become records. A decoded value can be written as Python source.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import math
import reprlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch

from ...errors import NotPortable
from ...torch_compat.basics.tensors import is_opaque_value, opaque_source

RETURN_TYPES = "torch.return_types"


class Ref(str):
    """Name of a value in the step function, such as `t3`."""

    __slots__ = ()


class Expr(str):
    """Python expression over the symbols of the step function, such as `2*s0`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Instance:
    """An object to construct from its fields: a dataclass, a named tuple, an OrderedDict, or (by
    position) a result type of a torch operator."""

    kind: type
    fields: dict[Any, Any]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in torch: `float32`."""
    return str(dtype).removeprefix("torch.")


def with_refs(value: Any, ref: Callable[[Any], Ref | None]) -> Any:
    """`value` with `ref(part)` in place of parts, and records for objects of other classes.

    Raises NotPortable for a list, tuple or dict of a class that could not be rebuilt.
    """
    if (found := ref(value)) is not None:
        return found
    kind = type(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return Instance(kind, {name: with_refs(getattr(value, name), ref) for name in names})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return Instance(kind, {name: with_refs(item, ref) for name, item in named})
    if kind.__module__ == RETURN_TYPES:
        return Instance(kind, {index: with_refs(item, ref) for index, item in enumerate(value)})
    if kind in (list, tuple, torch.Size):
        items = [with_refs(item, ref) for item in value]
        return items if kind is list else tuple(items)
    if kind in (dict, OrderedDict):
        fields = {key: with_refs(item, ref) for key, item in value.items()}
        return fields if kind is dict else Instance(kind, fields)
    if isinstance(value, (list, tuple, dict)):
        raise NotPortable(value=reprlib.repr(value), kind=kind.__qualname__)
    return value


def encode_result(structure: Any) -> Any:
    """JSON form of a model's result; raises NotPortable, which says that it is the result."""
    try:
        return encode(structure)
    except NotPortable as error:
        value, kind = error.facts["value"], error.facts["kind"]
        raise NotPortable(value=f"the model's result {value}", kind=kind) from None


def encode(value: Any) -> Any:
    """JSON form of `value`; raises NotPortable if another process could not rebuild it."""
    match value:
        case Ref():
            return {"ref": str(value)}
        case Expr():
            return {"expr": str(value)}
        case enum.Enum():
            kind = type(value)
            return {"enum": [kind.__module__, kind.__qualname__, value.name]}
        case Instance():
            _class(value.kind.__module__, value.kind.__qualname__)
            fields = [[encode(name), encode(item)] for name, item in value.fields.items()]
            return {"record": [value.kind.__module__, value.kind.__qualname__, fields]}
        case None | bool() | int() | str():
            return value
        case EllipsisType():
            return {"ellipsis": None}
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case complex():
            return {"complex": [encode(value.real), encode(value.imag)]}
        case list():
            return [encode(item) for item in value]
        case tuple():
            return {"tuple": [encode(item) for item in value]}
        case dict():
            return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
        case slice():
            return {"slice": [encode(part) for part in (value.start, value.stop, value.step)]}
        case torch.device():
            return {"device": str(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(value).removeprefix("torch.")}
        case _ if is_opaque_value(type(value)):
            text, classes = opaque_source(value)
            named = [[name, kind.__module__, kind.__qualname__] for name, kind in classes.items()]
            if _opaque(text, named) == value:
                return {"opaque": [text, named]}
    raise NotPortable(value=reprlib.repr(value), kind=type(value).__qualname__)


def decode(data: Any) -> Any:
    """The value whose JSON form is `data`."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, body),) = data.items()
    match kind:
        case "ref":
            return Ref(body)
        case "expr":
            return Expr(body)
        case "ellipsis":
            return ...
        case "float":
            return float(body)
        case "complex":
            return complex(decode(body[0]), decode(body[1]))
        case "tuple":
            return tuple(decode(item) for item in body)
        case "dict":
            return {decode(key): decode(item) for key, item in body}
        case "slice":
            return slice(*(decode(part) for part in body))
        case "device":
            return torch.device(body)
        case "torch":
            return getattr(torch, body)
        case "enum":
            return _enum_member(*body)
        case "opaque":
            return _opaque(*body)
        case "record":
            module, qualname, fields = body
            kind = _record_class(module, qualname)
            return Instance(kind, {decode(name): decode(item) for name, item in fields})
    raise NotPortable(value=data, kind=kind)


def _enum_member(module: str, qualname: str, name: str) -> enum.Enum:
    """Look up an enum member; only enum classes are indexed."""
    kind = _class(module, qualname)
    if not issubclass(kind, enum.Enum):
        raise NotPortable(value=f"{module}.{qualname}", kind="enum")
    return kind[name]


def _opaque(text: str, named: list[list[str]]) -> Any:
    """A value of an opaque type from its own source: calls of opaque classes, and literals."""
    classes = {name: _class(module, qualname) for name, module, qualname in named}

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Call(func=ast.Name(id=name)) if is_opaque_value(classes.get(name, object)):
                keywords = {str(each.arg): value(each.value) for each in node.keywords}
                return classes[name](*map(value, node.args), **keywords)
            case ast.Attribute(value=ast.Name(id=name), attr=member):
                kind = classes.get(name, object)
                if issubclass(kind, enum.Enum):
                    return kind[member]
            case ast.Tuple():
                return tuple(map(value, node.elts))
            case ast.List():
                return list(map(value, node.elts))
        return ast.literal_eval(node)

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, KeyError) as error:
        raise NotPortable(value=text, kind="opaque") from error


def _record_class(module: str, qualname: str) -> type:
    """Look up the class of a record; only classes that hold fields are accepted."""
    kind = _class(module, qualname)
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    known = kind is OrderedDict or module == RETURN_TYPES
    if not (dataclasses.is_dataclass(kind) or is_named_tuple or known):
        raise NotPortable(value=f"{module}.{qualname}", kind="record")
    return kind


def _class(module: str, qualname: str) -> type:
    """The class of that name; raises NotPortable if the name does not refer to a class."""
    target: Any = importlib.import_module(module)
    for part in qualname.split("."):
        target = getattr(target, part, None)
    if not isinstance(target, type):
        raise NotPortable(value=f"{module}.{qualname}", kind="class")
    return target


def refs(value: Any) -> list[Ref]:
    """All references inside a decoded value, in order."""
    match value:
        case Ref():
            return [value]
        case list() | tuple():
            return [ref for item in value for ref in refs(item)]
        case dict():
            return [ref for item in value.values() for ref in refs(item)]
        case slice():
            return refs([value.start, value.stop, value.step])
        case Instance():
            return refs(value.fields)
    return []


def source(value: Any, constants: dict[str, Any], ref: Callable[[Ref], str] = str) -> str:
    """A decoded value as Python source; parts without a literal form are added to `constants`."""

    def part(value: Any) -> str:
        match value:
            case Ref():
                return ref(value)
            case Expr():
                return str(value)
            case None | bool() | int() | str() if not isinstance(value, enum.Enum):
                return repr(value)
            case float():
                return repr(value) if math.isfinite(value) else f"float('{value}')"
            case list():
                return f"[{', '.join(map(part, value))}]"
            case tuple():
                return f"({''.join(part(item) + ', ' for item in value)})"
            case dict():
                items = (f"{part(key)}: {part(item)}" for key, item in value.items())
                return f"{{{', '.join(items)}}}"
            case slice():
                return f"slice({part(value.start)}, {part(value.stop)}, {part(value.step)})"
            case Instance(kind=kind) if kind is OrderedDict:
                return f"{part(kind)}({part(value.fields)})"
            case Instance(kind=kind) if kind.__module__ == RETURN_TYPES:
                return f"{part(kind)}({part(tuple(value.fields.values()))})"
            case Instance():
                return f"{part(value.kind)}(**{part(value.fields)})"
        name = f"k{len(constants)}"
        constants[name] = value
        return name

    return part(value)
