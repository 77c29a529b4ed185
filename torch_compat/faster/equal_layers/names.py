"""Strings of a module that a trace only passes to operators, such as the name of a layer.

An equal module may have another one. Every other use of a string is noted as an inspection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.source import SyntheticLocalSource
from torch._dynamo.variables import ConstantVariable, script_object
from torch.fx.node import map_aggregate


def _class(name: str, until_2_13: str) -> Any:
    return getattr(script_object, name, None) or getattr(script_object, until_2_13)


OPAQUE_CLASS: Any = _class("CustomClassVariable", "OpaqueObjectClassVariable")
"""A class whose objects are opaque to torch, in a trace."""
OPAQUE_OBJECT: Any = _class("CustomClassObjectVariable", "TorchScriptObjectVariable")


class Name(str):
    """A string of a module among the arguments of a node; `source` is where it was read."""

    source: Any


@dataclass
class Names:
    """Strings of modules, by expression, that were passed to operators, and that were inspected."""

    passed: set[str] = field(default_factory=set)
    inspected: set[str] = field(default_factory=set)


def _inspection(name: str) -> Any:
    """An attribute. Reading it marks the strings of the variable as inspected."""

    def read(self: Any) -> Any:
        self.names.inspected |= self.expressions
        return self.__dict__[name]

    return property(read, lambda self, value: self.__dict__.__setitem__(name, value))


class _OfNames:
    """A variable of Dynamo that stands for strings of a module, or an object made of them.

    Everything but passing it to an operator reads `value` or `proxy`.
    """

    def __init__(self, *args: Any, names: Names, expressions: frozenset[str], **kw: Any) -> None:
        self.names, self.expressions = names, frozenset[str]()
        super().__init__(*args, **kw)
        self.expressions = expressions

    value, proxy = _inspection("value"), _inspection("proxy")

    def passed(self) -> Any:
        """The value, which is passed to an operator or to the constructor of an object."""
        self.names.passed |= self.expressions
        return self.__dict__["value"]


class NameVariable(_OfNames, ConstantVariable):
    """A string of a module."""

    _nonvar_fields = {"names", "expressions", *ConstantVariable._nonvar_fields}  # noqa: RUF012

    def as_proxy(self) -> Any:
        name = Name(self.passed())
        name.source = self.source
        return name


class LabelVariable(_OfNames, OPAQUE_OBJECT):  # type: ignore[misc]
    """An opaque object that the model makes of strings of a module, such as vLLM's `LayerName`."""

    _nonvar_fields = {"names", "expressions", *OPAQUE_OBJECT._nonvar_fields}  # noqa: RUF012

    def as_proxy(self) -> Any:
        self.passed()
        expressions, self.expressions = self.expressions, frozenset()
        proxy = super().as_proxy()  # reads `proxy`
        self.expressions = expressions
        return proxy


def names_in(node: torch.fx.Node) -> list[Name]:
    values: list[Any] = []
    map_aggregate((node.args, node.kwargs), values.append)
    return [value for value in values if type(value) is Name]


def is_label(node: torch.fx.Node) -> bool:
    """Whether a node stands for an object that Dynamo's code makes before it calls the graph."""
    return isinstance(getattr(node.meta.get("grapharg"), "source", None), SyntheticLocalSource)


def plain_names(graph: torch.fx.Graph) -> None:
    """Make names in the arguments of nodes plain strings again."""
    for node in filter(names_in, graph.nodes):
        node.args, node.kwargs = map_aggregate(
            (node.args, node.kwargs), lambda value: str(value) if type(value) is Name else value
        )


def text(source: Any) -> str:
    return str(source.name)
