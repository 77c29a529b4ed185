"""Where Dynamo's expressions lead: from the text of a source to a place that can be found again.

Dynamo names each value that it relied on by an expression over `L` (arguments) and `G` (globals of
the forward), such as `L['self'].act.__self__.k`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
import weakref
from ast import Attribute, Call, Constant, Name, Subscript
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from ...cache.keys.environment import VARIABLES
from ...torch_compat.basics.modules import called_function
from ...torch_compat.tracing.dynamo import Captured
from .expressions import parsed
from .places import (
    CONTAINERS,
    GLOBALS,
    HOOK_TABLES,
    MODEL,
    Place,
    Step,
    called_as,
    encoded_key,
    follow,
    spelled,
)

VARIABLES_AT: tuple[Step, ...] = ("environ", "_data")


class Unlocatable(Exception):
    """No place can be given for an expression of Dynamo's."""


@dataclass(frozen=True)
class Located:
    """A value and its place; `root` is None for what hangs below an argument."""

    value: Any
    root: str | None
    steps: tuple[Step, ...] = ()

    def then(self, value: Any, *steps: Step) -> Located:
        return Located(value, self.root, (*self.steps, *steps))


@dataclass
class Locator:
    """Finds the values of expressions in one trace, and their places."""

    model: torch.nn.Module
    captured: Captured
    located: dict[str, Located] = field(default_factory=dict)
    aliases: dict[str, tuple[Located, Located]] = field(default_factory=dict)
    """Other places of the model, of modules and of the environment, each with the one that what
    is below is located from."""
    _text: str = ""
    _inside: dict[str, Located] = field(default_factory=dict)

    def place(self, expression: str) -> Place:
        """The place of an expression; raises Unlocatable, also for what hangs below an argument."""
        located = self.locate(expression)
        if located.root is None:
            raise Unlocatable(f"{expression} is part of an argument")
        name = spelled(located.root, located.steps, self.model)
        if located.root == MODEL:  # unlike the name of any weight
            name = re.sub(r"\bmodel\b", "self", name, count=1)
        return Place(located.root, located.steps, name)

    def is_registered(self, place: Place) -> bool:
        """Whether a place is one of a parameter or buffer, and only modules lead to it."""
        value: Any = self.model
        above: Step = ""
        for step in place.steps:
            if not isinstance(value, torch.nn.Module) and above not in CONTAINERS:
                return False
            value, above = follow(value, step), step
        return place.root == MODEL

    def locate(self, expression: str) -> Located:
        if expression not in self.located:
            try:
                node = parsed(expression)
            except SyntaxError as error:
                raise Unlocatable(f"{expression} cannot be located") from error
            self._text = expression
            self.located[expression] = self._find(node)
        return self.located[expression]

    def _find(self, node: ast.expr) -> Located:
        """What an expression inside the one that is being located leads to: many begin alike."""
        inside = self._text[node.col_offset : node.end_col_offset]
        if inside not in self._inside:
            self._inside[inside] = self._followed(node)
        return self._inside[inside]

    def _followed(self, node: ast.expr) -> Located:
        try:
            located = self._step(node)
        except (LookupError, AttributeError, TypeError) as error:
            raise Unlocatable(f"{ast.unparse(node)} cannot be located") from error
        canonical = self._canonical(located.value) or located
        here, there = (located.root, located.steps), (canonical.root, canonical.steps)
        if located.root is not None and here != there:
            self.aliases.setdefault(ast.unparse(node), (located, canonical))
        return canonical

    def _canonical(self, value: Any) -> Located | None:
        """The one place that the model, a module or the environment is located at."""
        if value is self.model:
            return Located(value, MODEL)
        if value is VARIABLES:
            return Located(value, "os", VARIABLES_AT)
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            return Located(value, value.__name__)
        return None

    def _step(self, node: ast.expr) -> Located:
        match node:
            case Subscript(Name("L"), Constant(name)):
                return self._local(str(name))
            case Subscript(Name("G"), Constant(name)):
                return self._global(str(name))
            case Call(Name("__import__"), [Constant(str(name))]):
                return Located(sys.modules[name], name)
            case Call(Name("___from_numpy"), [inner]):
                base = self._find(inner)
                if not base.value.shape:  # a number is copied, so that no place has its memory
                    raise LookupError(ast.unparse(node))
                return base.then(torch.as_tensor(base.value, device="cpu"), ["tensor", None])
            case Call(Name("type"), [inner]):
                base = self._find(inner)
                return base.then(type(base.value), ["type", None])
            case Subscript(Call(Name("dict"), [Attribute(inner, "__dict__")]), Constant(str(name))):
                return self._class_attribute(inner, name)
            case (
                Attribute(inner, name)
                | Call(Name("dict"), [Attribute(inner, "__dict__" as name)])
                | Call(Name("getattr"), [inner, Constant(str(name))])
                | Call(Attribute(Name("object"), "__getattribute__"), [inner, Constant(str(name))])
            ):
                base = self._find(inner)
                return base.then(getattr(base.value, name), name)
            case (
                Subscript(
                    Call(Name("list"), [Call(Attribute(Name("dict"), "keys"), [inner])]),
                    Constant(int(index)),
                )
                | Subscript(Call(Name("list"), [inner]), Constant(int(index)))
                | Call(Name("___set_getitem"), [inner, Constant(int(index))])
            ):
                return self._key(self._find(inner), index)
            case Subscript(inner, key) | Call(
                Attribute(Name("dict" | "list"), "__getitem__"), [inner, key]
            ):
                base = self._find(inner)
                if isinstance(key, Subscript):  # `d[list(dict.keys(d))[index]]`
                    return self._value(base, _literal(key.slice))
                return self._item(base, _literal(key))
            case Call(inner, []):
                base = self._find(inner)
                if base.root is None or _only_reads(base.value):
                    return base.then(base.value(), ["call", None])
        raise LookupError(ast.unparse(node))

    def _key(self, base: Located, index: int) -> Located:
        """A key of a dict or an item of a set, whose position counts only if it has no name."""
        key = list(base.value)[index]
        try:
            return base.then(key, ["held", self._name(base, key)])
        except TypeError:
            return base.then(key, ["key", index])

    def _value(self, base: Located, index: int) -> Located:
        key, value = list(base.value.items())[index]
        try:
            return base.then(value, ["item", self._name(base, key)])
        except TypeError:
            return base.then(value, ["value", index])

    def _name(self, base: Located, key: Any) -> Any:
        """A key as data; raises TypeError for one without a name, such as the number of a hook."""
        if base.steps and str(base.steps[-1]).startswith(HOOK_TABLES):
            raise TypeError
        return encoded_key(key)

    def _item(self, base: Located, key: Any) -> Located:
        try:
            return base.then(base.value[key], ["item", self._name(base, key)])
        except TypeError:
            index = list(base.value).index(key)
            return base.then(base.value[key], ["value", index])

    def _class_attribute(self, inner: ast.expr, name: str) -> Located:
        """`dict(type(x).__mro__[i].__dict__)[name]`: as all bases of the class give it."""
        base = self._find(inner)
        match inner:
            case Subscript(Attribute(cls, "__mro__")):
                derived = self._find(cls)
                if inspect.getattr_static(derived.value, name) is vars(base.value)[name]:
                    base = derived
        return base.then(inspect.getattr_static(base.value, name), ["static", name])

    def _local(self, name: str) -> Located:
        arguments = self.captured.local_scope
        if name in arguments:
            return Located(arguments[name], None)
        forward = called_function(self.model)
        code = getattr(forward, "__code__", None)
        if code is None or name not in code.co_freevars:
            raise LookupError(name)  # of the function that replaces a partial
        index = code.co_freevars.index(name)
        cell = forward.__closure__[index].cell_contents
        steps = (called_as(self.model), "__closure__", ["item", index], "cell_contents")
        return Located(cell, MODEL, steps)

    def _global(self, name: str) -> Located:
        if name in self.captured.aliases:
            module = self.captured.aliases[name]
            return Located(sys.modules[module], module)
        if name.startswith("__builtins_dict__"):
            return Located(vars(sys.modules["builtins"]), "builtins", ("__dict__",))
        value = self.captured.global_scope[name]
        module = str(value.get("__name__")) if isinstance(value, dict) else ""
        if module.startswith("namedtuple_"):  # made by the standard library
            return Located(value, None)
        if module in sys.modules and vars(sys.modules[module]) is value:
            return Located(value, module, ("__dict__",))
        if _MADE_BY_DYNAMO.search(name):  # there in this process alone
            if (canonical := self._canonical(value)) is None:
                raise LookupError(name)
            return canonical
        return Located(value, GLOBALS, (["item", name],))


def _only_reads(function: Any) -> bool:
    """Whether a call without arguments only reads: a weak reference, a context variable, or the
    names and the context of a tensor subclass."""
    if isinstance(function, weakref.ReferenceType):
        return True
    owner = getattr(function, "__self__", None)
    flattens = getattr(function, "__name__", "") == "__tensor_flatten__"
    return isinstance(owner, ContextVar) or (flattens and isinstance(owner, torch.Tensor))


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise LookupError(ast.unparse(node)) from error


def module_place(module: str, qualname: str) -> Located | None:
    """The place `module.qualname`, if all of it is there."""
    value: Any = sys.modules.get(module)
    steps: list[Step] = []
    for name in qualname.split("."):
        try:
            value = (
                inspect.getattr_static(value, name)
                if isinstance(value, type)
                else vars(value)[name]
            )
        except (AttributeError, KeyError, TypeError):
            return None
        steps.append(["static", name] if steps else name)
    return Located(value, module, tuple(steps))


_MADE_BY_DYNAMO = re.compile(r"^___|^__compiled_fn|_\d+_c\d+(_\d+)?$")
