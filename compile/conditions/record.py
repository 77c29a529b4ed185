"""The conditions of a trace, from what Dynamo guarded, inlined and read.

Dynamo names each value that it relied on by an expression over `L` (arguments) and `G` (globals of
the forward), such as `L['self'].act.__self__.k`. The expression is translated into a place; what it
cannot be translated into, and what has no stable description, makes the trace not cacheable.

Guards on arguments are left out: a step checks its tensors, and other arguments are in the key.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
import weakref
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ...cache.keys.bytecode import nested_codes
from ...cache.keys.encoder import Undescribable, unwrapped
from ...cache.keys.factors import Json
from ...torch_compat.dynamo import Captured, GuardFact, is_torch_file
from .conditions import HOOKS, IDENTITY, Recorder
from .places import GLOBALS, MODEL, Step, called_as, encoded_key, forward_function

OF_TORCH = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.fx",
    "torch._higher_order_ops",
)
"""Modules that a warm start does not import. They are known by torch's version."""

_KINDS = {
    "TYPE_MATCH": "type",
    "NN_MODULE": "type",
    "SEQUENCE_LENGTH": "length",
    "DICT_KEYS_MATCH": "keys",
    "MAPPING_KEYS_CHECK": "keys",
    "DICT_KEYS": "keys",
    "DICT_CONTAINS": "contains",
    "DICT_NOT_CONTAINS": "contains",
    "SET_CONTAINS": "contains",
    "SET_NOT_CONTAINS": "contains",
    "HASATTR": "hasattr",
    "NOT_PRESENT_IN_GENERIC_DICT": "in __dict__",
    "WEAKREF_ALIVE": "exists",
    "NOT_NONE_MATCH": "exists",
}
"""What is observed for a kind of guard; the value itself for all others."""

_WITHOUT_IDENTITY = (bool, int, float, complex, str, bytes, tuple, Enum, type, types.NoneType)
_HOOK_TABLES = (*HOOKS, *(f"_global{name}" for name in HOOKS))


class Unlocatable(Exception):
    """No place can be given for an expression of Dynamo's."""


@dataclass(frozen=True)
class Conditions:
    """What a trace relied on, as data, and why it must not be cached (empty if it may)."""

    data: Mapping[str, Json]
    obstacles: tuple[str, ...]


@dataclass(frozen=True)
class Located:
    """A value and its place; `root` is None for what hangs below an argument."""

    value: Any
    root: str | None
    steps: tuple[Step, ...] = ()

    def then(self, value: Any, *steps: Step) -> Located:
        return Located(value, self.root, (*self.steps, *steps))


def record_conditions(
    model: torch.nn.Module, scope: Mapping[str, Any], captured: Captured
) -> Conditions:
    """The conditions of `captured`; `scope` has `L`, the arguments, and `G`, the globals."""
    trace = _TraceConditions(model, scope, captured)
    trace.add_guards()
    trace.add_code()
    trace.add_variables()
    return Conditions(trace.recorder.data(), tuple(dict.fromkeys(trace.obstacles)))


@dataclass
class _TraceConditions:
    model: torch.nn.Module
    scope: Mapping[str, Any]
    captured: Captured
    obstacles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.model)
        self._weights = {id(t) for t in (*self.model.parameters(), *self.model.buffers())}
        self._found: dict[str, Located] = {}
        self._classes: dict[type, Located] = {}

    def add_guards(self) -> None:
        self._add_class(Located(self.model, MODEL))
        for guard in self.captured.guards:
            if guard.expression and not guard.expression.startswith("___get_torch_function_mode"):
                try:
                    self._add_guard(guard)
                except (Unlocatable, Undescribable) as error:
                    where = f" ({guard.where})" if guard.where else ""
                    self.obstacles.append(f"{error}{where}")

    def _add_guard(self, guard: GuardFact) -> None:
        located = self._locate(guard.expression)
        if located.root is None or located.root.startswith(OF_TORCH):
            return
        if guard.kind == "DUPLICATE_INPUT":
            other = self._locate(guard.argument)
            if other.root is not None:
                self.recorder.same((located.root, located.steps), (other.root, other.steps))
            return
        value, name = located.value, located.steps[-1] if located.steps else ""
        if _is_environment(located):
            return  # recorded by name
        of_attribute = guard.kind in ("HASATTR", "NOT_PRESENT_IN_GENERIC_DICT")
        if id(value) in self._weights and not of_attribute:
            return  # the form of each weight is in the key
        if guard.kind == "EMPTY_NN_MODULE_HOOKS_DICT":
            self.recorder.add(located.root, located.steps[:-1], "hooks")
            return
        if str(name).startswith(_HOOK_TABLES):  # keyed by a number that differs from run to run
            self.recorder.add(located.root, located.steps, "length")
            return
        self._add_class(located)
        kind, argument = _KINDS.get(guard.kind, "value"), guard.argument
        if kind == "contains":
            try:
                argument = encoded_key(argument)
            except TypeError:
                kind, argument = "keys", None
        elif kind not in ("hasattr", "in __dict__"):
            argument = None
        if isinstance(value, types.FunctionType) and _result_is_kept(value):
            raise Undescribable(guard.expression, "is called while tracing and its result is kept")
        if kind == "length" and isinstance(value, Mapping | Set):
            kind = "keys" if isinstance(value, Mapping) else "value"  # Dynamo has no other guard
        self.recorder.add(located.root, located.steps, kind, argument)
        if kind in ("type", "length", "keys") and not isinstance(value, _WITHOUT_IDENTITY):
            self.recorder.add(located.root, located.steps, IDENTITY)

    def _add_class(self, located: Located) -> None:
        """Remember where the class of a value, or a value that is a class, can be found."""
        assert located.root is not None
        if isinstance(located.value, type):
            self._classes.setdefault(located.value, located)
        else:
            cls = type(located.value)
            self._classes.setdefault(cls, located.then(cls, ["type", None]))

    def add_code(self) -> None:
        """Conditions on the code of each function that was inlined, as loaded in this process."""
        for name in sorted({"forward", called_as(self.model)}):
            self.recorder.add(MODEL, [name], "code")
        forward = forward_function(self.model)
        if isinstance(forward, types.FunctionType):
            for name in ("__defaults__", "__kwdefaults__"):
                steps = [
                    "forward",
                    *(["__func__"] if hasattr(self.model.forward, "__func__") else []),
                ]
                self._try(MODEL, [*steps, name], "value")
        inlined = {
            code: function
            for code, function in self.captured.inlined.functions.items()
            if not is_torch_file(code.co_filename) and not _is_standard(code)
        }
        wanted = {*self.captured.inlined.functions, getattr(forward, "__code__", None)}
        covered = {code for cls in self._all_classes() for code in self._add_methods(cls, wanted)}
        by_guard = self._functions_of_guards()
        for code, function in inlined.items():
            if code not in covered and not any(_contains(each, code) for each in by_guard):
                self._add_function(code, function)

    def _all_classes(self) -> dict[type, Located]:
        """Classes that guards are on, and those of submodules, by where they are found."""
        for name, module in self.model.named_modules():
            steps: list[Step] = []
            for part in name.split(".") if name else ():
                steps += ["_modules", ["item", part]]
            self._add_class(Located(module, MODEL, tuple(steps)))
        return self._classes

    def _add_methods(self, cls: type, wanted: set[Any]) -> Iterator[types.CodeType]:
        """Conditions on the methods of a class that were inlined: which function each name is."""
        located = self._place_of_class(cls)
        if located is None or located.root is None:
            return
        for name in sorted({name for base in cls.__mro__ for name in vars(base)}):
            function = unwrapped(inspect.getattr_static(cls, name, None))
            code = getattr(function, "__code__", None)
            if isinstance(code, types.CodeType) and code in wanted:
                self._try(located.root, [*located.steps, ["static", name]], "code")
                yield code

    def _place_of_class(self, cls: type) -> Located | None:
        """By module and name where that leads to the class, else from the model or the globals."""
        if (found := _module_place(cls.__module__, cls.__qualname__)) and found.value is cls:
            return found
        return self._classes[cls]

    def _functions_of_guards(self) -> list[types.CodeType]:
        values = (unwrapped(each.value) for each in self._found.values() if each.root is not None)
        return [value.__code__ for value in values if isinstance(value, types.FunctionType)]

    def _add_function(self, code: types.CodeType, function: types.FunctionType | None) -> None:
        name = function.__qualname__ if function else code.co_qualname
        modules = [function.__module__] if function else []
        modules += [
            module
            for module, each in list(sys.modules.items())
            if getattr(each, "__file__", None) == code.co_filename
        ]
        for module in modules:
            for path in (
                name,
                name.partition(".<locals>")[0],
                code.co_qualname.partition(".<locals>")[0],
            ):
                found = _module_place(module, path)
                own = getattr(unwrapped(found.value), "__code__", None) if found else None
                if found and found.root and own is not None and _contains(own, code):
                    self._try(found.root, found.steps, "code")
                    return
        where = f"{code.co_filename}:{code.co_firstlineno}"
        self.obstacles.append(f"the code of {code.co_qualname} cannot be located ({where})")

    def _try(self, root: str, steps: list[Step] | tuple[Step, ...], kind: str) -> None:
        try:
            self.recorder.add(root, steps, kind)
        except Undescribable as error:
            self.obstacles.append(str(error))

    def add_variables(self) -> None:
        for name in sorted(map(str, self.captured.inlined.variables - {None})):
            self.recorder.variable(name)
        if None in self.captured.inlined.variables:
            self.obstacles.append("an environment variable is read whose name is not constant")

    def _locate(self, expression: str) -> Located:
        if expression not in self._found:
            try:
                node = ast.parse(expression, mode="eval").body
            except SyntaxError as error:
                raise Unlocatable(f"{expression} cannot be located") from error
            self._found[expression] = self._find(node)
        return self._found[expression]

    def _find(self, node: ast.expr) -> Located:
        try:
            located = self._step(node)
        except (LookupError, AttributeError, TypeError) as error:
            raise Unlocatable(f"{ast.unparse(node)} cannot be located") from error
        if located.value is self.model:
            return Located(self.model, MODEL)
        if isinstance(located.value, types.ModuleType):
            name = located.value.__name__
            return (
                Located(located.value, name) if sys.modules.get(name) is located.value else located
            )
        return located

    def _step(self, node: ast.expr) -> Located:
        match node:
            case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=name)):
                return self._local(str(name))
            case ast.Subscript(value=ast.Name(id="G"), slice=ast.Constant(value=name)):
                return self._global(str(name))
            case ast.Call(func=ast.Name(id="__import__"), args=[ast.Constant(value=str(name))]):
                return Located(sys.modules[name], name)
            case ast.Call(func=ast.Name(id="type"), args=[inner]):
                base = self._find(inner)
                return base.then(type(base.value), ["type", None])
            case ast.Subscript(
                value=ast.Call(
                    func=ast.Name(id="dict"), args=[ast.Attribute(value=inner, attr="__dict__")]
                ),
                slice=ast.Constant(value=str(name)),
            ):
                return self._class_attribute(inner, name)
            case ast.Call(
                func=ast.Name(id="dict"), args=[ast.Attribute(value=inner, attr="__dict__")]
            ):
                base = self._find(inner)
                return base.then(vars(base.value), "__dict__")
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="list"), args=[inner]),
                slice=ast.Constant(value=int(index)),
            ):
                mapping = _argument_of_keys(inner)
                base = self._find(mapping)
                return base.then(list(base.value)[index], ["key", index])
            case ast.Subscript(
                value=inner, slice=ast.Subscript(slice=ast.Constant(value=int(index)))
            ):
                base = self._find(inner)  # `d[list(dict.keys(d))[index]]`
                return base.then(list(base.value.values())[index], ["value", index])
            case ast.Subscript(value=inner, slice=key):
                return self._item(self._find(inner), _literal(key))
            case ast.Attribute(value=inner, attr=name):
                base = self._find(inner)
                return base.then(getattr(base.value, name), name)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=kind), attr=method), args=[inner, argument]
            ) if (kind, method) in (
                ("object", "__getattribute__"),
                ("dict", "__getitem__"),
                ("list", "__getitem__"),
            ):
                base = self._find(inner)
                if method == "__getattribute__":
                    name = str(_literal(argument))
                    return base.then(getattr(base.value, name), name)
                if isinstance(argument, ast.Subscript):
                    index = int(_literal(argument.slice))
                    return base.then(list(base.value.values())[index], ["value", index])
                return self._item(base, _literal(argument))
            case ast.Call(func=ast.Name(id="getattr"), args=[inner, ast.Constant(value=str(name))]):
                base = self._find(inner)
                return base.then(getattr(base.value, name), name)
            case ast.Call(func=inner, args=[]):
                base = self._find(inner)
                if base.root is not None and not isinstance(base.value, weakref.ReferenceType):
                    raise LookupError(ast.unparse(node))
                return base.then(base.value(), ["call", None])
        raise LookupError(ast.unparse(node))

    def _item(self, base: Located, key: Any) -> Located:
        try:
            return base.then(base.value[key], ["item", encoded_key(key)])
        except TypeError:
            index = list(base.value).index(key)
            return base.then(base.value[key], ["value", index])

    def _class_attribute(self, inner: ast.expr, name: str) -> Located:
        """`dict(type(x).__mro__[i].__dict__)[name]`: as all bases of the class give it."""
        match inner:
            case ast.Subscript(value=ast.Attribute(value=cls, attr="__mro__")):
                base = self._find(cls)
                if inspect.getattr_static(base.value, name) is vars(self._find(inner).value)[name]:
                    return base.then(inspect.getattr_static(base.value, name), ["static", name])
        base = self._find(inner)
        return base.then(inspect.getattr_static(base.value, name), ["static", name])

    def _local(self, name: str) -> Located:
        arguments = self.scope["L"]
        if name in arguments:
            return Located(arguments[name], None)
        forward = forward_function(self.model)
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
        value = self.scope["G"][name]
        module = str(value.get("__name__")) if isinstance(value, dict) else ""
        if module in sys.modules and vars(sys.modules[module]) is value:
            return Located(value, module, ("__dict__",))
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            return Located(value, value.__name__)
        if _MADE_BY_DYNAMO.search(name):
            raise LookupError(name)
        return Located(value, GLOBALS, (["item", name],))


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise LookupError(ast.unparse(node)) from error


def _argument_of_keys(node: ast.expr) -> ast.expr:
    """`d` of `dict.keys(d)`; any other expression itself."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="dict"), attr="keys"), args=[inner]):
            return inner
    return node


def _is_environment(located: Located) -> bool:
    """An item of `os.environ`, whose variable is a separate condition."""
    return (
        located.root == "os"
        and located.steps[:2]
        in (
            ("environ", "_data"),
            ("environb", "_data"),
        )
        and len(located.steps) > 2
    )


def _result_is_kept(function: types.FunctionType) -> bool:
    """Whether Dynamo calls a function while tracing, by `assume_constant_result`."""
    is_torch = str(function.__module__).partition(".")[0] == "torch"
    return not is_torch and getattr(function, "_dynamo_marked_constant", False)


def _is_standard(code: types.CodeType) -> bool:
    """Whether code is of the standard library, which is known by the version of Python."""
    file = code.co_filename
    return file.startswith("<frozen ") or (file.startswith(_STANDARD) and "-packages/" not in file)


_MADE_BY_DYNAMO = re.compile(r"^___|^__compiled_fn|_\d+_c\d+(_\d+)?$")
_STANDARD = f"{inspect.getfile(inspect).rpartition('/')[0]}/"


def _contains(code: types.CodeType, inner: types.CodeType) -> bool:
    return (
        code is inner or code == inner or any(_contains(each, inner) for each in nested_codes(code))
    )


def _module_place(module: str, qualname: str) -> Located | None:
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
