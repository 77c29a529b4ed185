"""Values of a module that a trace may only pass to operators, such as the name of a layer.

An equal module may have another one. Whatever else looks at a value is noted in `Names`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.source import SyntheticLocalSource
from torch._dynamo.variables import ConstantVariable, script_object
from torch.fx.node import map_aggregate

_TORCH_OPS = ("aten", "prim", "prims", "inductor", "higher_order")


def _class(name: str, until_2_13: str) -> Any:
    return getattr(script_object, name, None) or getattr(script_object, until_2_13)


OPAQUE_CLASS: Any = _class("CustomClassVariable", "OpaqueObjectClassVariable")
"""A class whose objects are opaque to torch, in a trace."""
OPAQUE_OBJECT: Any = _class("CustomClassObjectVariable", "TorchScriptObjectVariable")


class Name(str):
    """A string of a module in the arguments of a node; `source` is where it was read."""

    source: Any


class Number(int):
    """An integer of a module in the arguments of a node; `source` is where it was read."""

    source: Any


PASSED: dict[type, Any] = {str: Name, int: Number}
"""What stands for a value of a module in the arguments of a node."""


def passed_within(value: Any) -> list[Any]:
    """Each `Name` and `Number` among the arguments of a node."""
    found: list[Any] = []
    kinds = (*PASSED.values(),)
    map_aggregate(value, lambda each: found.append(each) if type(each) in kinds else None)
    return found


@dataclass
class Names:
    """Values of modules, by expression, that were passed to operators, and that were looked at."""

    passed: set[str] = field(default_factory=set)
    inspected: set[str] = field(default_factory=set)


def _noted(name: str) -> Any:
    """An attribute whose reading is a look at the values at the variable's `places`."""

    def read(self: Any) -> Any:
        self.names.inspected |= self.places
        return self.__dict__[name]

    return property(read, lambda self, value: self.__dict__.__setitem__(name, value))


class PassedConstant(ConstantVariable):
    """A value of a module. Everything but passing it to an operator reads `value`."""

    _nonvar_fields = {"names", *ConstantVariable._nonvar_fields}  # noqa: RUF012

    def __init__(self, value: Any, names: Names, source: Any, **kwargs: Any) -> None:
        self.names = names
        super().__init__(value, source=source, **kwargs)

    value = _noted("value")

    @property
    def places(self) -> set[str]:
        return {text(self.source)}

    def as_proxy(self) -> Any:
        value = self.__dict__["value"]
        passed = PASSED[type(value)](value)
        passed.source = self.source
        self.names.passed |= self.places
        return passed

    def plain(self) -> Any:
        return ConstantVariable.create(self.__dict__["value"], source=self.source)


class PassedObject(OPAQUE_OBJECT):  # type: ignore[misc]
    """An object that was made of values of a module. Everything but passing it to an operator reads
    `value` or `proxy`."""

    _nonvar_fields = {"names", "places", *OPAQUE_OBJECT._nonvar_fields}  # noqa: RUF012

    def __init__(self, *args: Any, names: Names, places: frozenset[str], **kwargs: Any) -> None:
        self.names = names
        self.places: frozenset[str] = frozenset()
        super().__init__(*args, **kwargs)
        self.places = places

    @classmethod
    def of(cls, made: Any, names: Names) -> Any:
        sources = made.ctor_arg_sources
        places = frozenset(text(each) for each in sources if each is not None)
        given = made.proxy, made.value, made.ctor_args_kwargs
        return cls(*given, ctor_arg_sources=sources, names=names, places=places)

    value, proxy = _noted("value"), _noted("proxy")

    def as_proxy(self) -> Any:
        places, self.places = self.places, frozenset()
        proxy = super().as_proxy()  # reads `proxy`
        self.places = places
        self.names.passed |= places
        return proxy

    def plain(self) -> Any:
        value = self.__dict__["value"]
        return OPAQUE_OBJECT(value, value)


def may_differ(node: torch.fx.Node) -> bool:
    """Whether a copy of a node may have another name, or another number: of a custom operator."""
    kinds = {*map(type, passed_within((node.args, node.kwargs)))}
    ops = torch._ops.OpOverload, torch._ops.OpOverloadPacket
    is_custom = (
        isinstance(node.target, ops) and str(node.target).partition(".")[0] not in _TORCH_OPS
    )
    is_named = Name in kinds or any(map(is_made, node.all_input_nodes))
    return is_named or (Number in kinds and is_custom)


def is_made(node: torch.fx.Node) -> bool:
    """Whether a node stands for an object that Dynamo's code makes before it calls the graph."""
    return isinstance(getattr(node.meta.get("grapharg"), "source", None), SyntheticLocalSource)


def without_names(graph: torch.fx.Graph) -> None:
    """Make names and numbers of layers in the arguments of nodes plain values again."""
    plain = {special: kind for kind, special in PASSED.items()}
    for node in graph.nodes:
        if passed_within((node.args, node.kwargs)):
            node.args, node.kwargs = map_aggregate(
                (node.args, node.kwargs), lambda each: plain.get(type(each), lambda x: x)(each)
            )


def text(source: Any) -> str:
    return str(source.name)
