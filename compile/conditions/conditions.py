"""Conditions of a trace: recorded as data with a bundle, checked by value when it is loaded.

Conditions form a tree of places, so that each value is looked up once, and equal subtrees (the
layers of a model) are stored once. A condition is `[kind, argument, observation]`: what is observed
of the value at its place, and what was observed when the model was traced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ...cache.keys import environment
from ...cache.keys.code import code_parts, mutated_names
from ...cache.keys.encoder import (
    DATA,
    KNOWN,
    MAX_DEPTH,
    Encoder,
    Undescribable,
    class_name,
    class_text,
    function_text,
    package_of,
    stable_text,
    unwrapped,
)
from ...cache.keys.factors import Json, canonical
from ...torch_compat.basics.frames import is_torch_file
from .custom_ops import op_parts, op_signature
from .places import HOOKS, MISSING, MODEL, Step, follow, key_of, reader, root_value, spelled

_NATIVE = {
    *(type, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.ClassMethodDescriptorType, types.MemberDescriptorType),
}
_CODE = re.compile(r" <code \w+>")
IDENTITY = "identity"
"""Kind of the condition that two places hold one object exactly if they did in the trace.

Dynamo decides `a is b` without a guard. Objects are numbered in the order in which they are found;
the numbers are stored apart from the tree, so that equal layers stay equal subtrees.
"""
TRACES = "traces"
"""The conditions of each trace, where a model has several."""


@dataclass(frozen=True)
class Conditions:
    """What a trace relied on, as data, and why it must not be cached (empty if it may)."""

    data: Mapping[str, Json]
    obstacles: tuple[str, ...]

    @classmethod
    def joined(cls, traces: Sequence[Conditions]) -> Conditions:
        """What several traces of a model rely on."""
        obstacles = dict.fromkeys(each for trace in traces for each in trace.obstacles)
        data: list[Json] = [dict(trace.data) for trace in traces]
        return cls(traces[0].data if len(traces) == 1 else {TRACES: data}, tuple(obstacles))


@dataclass(frozen=True, slots=True)
class BrokenCondition:
    """A condition that does not hold."""

    what: str
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (_CODE.sub("", text) for text in (self.old, self.new))
        if old == new:
            return f"{self.what}: the code of {old} has changed"
        return f"{self.what}: {old} -> {new}"


Observation: TypeAlias = "str | dict[str, str]"
"""What a condition compares: a text, or the text of each part."""


def observed(kind: str, argument: Any, value: Any) -> Observation:
    """What a condition of `kind` observes of a value; raises Undescribable."""
    if value is MISSING:
        return "missing"
    return _OBSERVERS[kind](value, argument)


def _code(value: Any, _: Any) -> str:
    function = unwrapped(value)
    return _function(function) if isinstance(function, types.FunctionType) else stable_text(value)


def _function(function: types.FunctionType, outer: tuple[int, ...] = ()) -> str:
    """A function with its defaults and closure, which Dynamo does not guard where it makes objects.

    It guards the objects in them: of those only the class is stated.
    """
    outer = (*outer, id(function))
    varying = mutated_names(function.__code__) if function.__closure__ else ()
    bound = {"defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            bound[name] = None if name in varying else cell.cell_contents
    texts = [f"{name}={_bound(each, outer)}" for name, each in bound.items() if each is not None]
    return function_text(function) + (f" with {', '.join(texts)}" if texts else "")


def _bound(value: Any, outer: tuple[int, ...]) -> str:
    if id(value) in outer or len(outer) > MAX_DEPTH:
        return "..."
    if isinstance(value, types.FunctionType):
        return _function(value, outer)
    inside = (*outer, id(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_bound(each, inside) for each in value)}]"
    if isinstance(value, dict):
        return _bound(list(value.items()), inside)
    try:
        is_set = isinstance(value, set | frozenset)
        text = stable_text(value) if is_set else Encoder().plain(value, "")
    except Undescribable:
        text = None
    return class_name(type(value)) if text is None else text


def _added(value: Any, names: Sequence[str]) -> str:
    """What is not torch's or Python's own of `names` in a class or module, or among its operators.

    Dynamo guards neither builtins nor methods of tensors nor metaclasses. A native function is
    known by its name, a Python function of torch by its line and defaults.
    """
    read = frozenset(names)
    definitions: dict[str, str] = {}
    if not isinstance(value, type):
        for name in names:
            if (each := vars(value).get(name, MISSING)) is not MISSING:
                definitions |= _definition(name, each, is_read=True)
        return stable_text(definitions)
    apart = () if value is torch.Tensor else torch.Tensor.__mro__  # has a condition of its own
    for holder in reversed([each for each in value.__mro__ if each not in apart]):
        for name, each in vars(holder).items():
            if name in read or (name[:2] == "__" and not _is_own(each)):
                definitions |= _definition(name, each, name in read)
    return stable_text(definitions)


def _is_own(value: Any) -> bool:
    """Whether a definition is native code, or a function of torch. In every start for thousands."""
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
        return {name: _bound(value, ())} if is_read else {}
    code = function.__code__
    if not is_torch_file(code.co_filename):
        return code_parts(function, name)
    line = f"{code.co_qualname} {code.co_firstlineno} {_bound(function.__defaults__, ())}"
    return {name: line} if is_read else {}


def _attribute(cls: Any, name: str) -> str:
    """What a class has under a name, without calling descriptors; of an object all it holds."""
    held = unwrapped(inspect.getattr_static(cls, name, MISSING))
    if held is MISSING:
        return "missing"
    known = package_of(type(held)) in KNOWN
    return _bound(held, ()) if known else stable_text(code_parts(held, name))


def _result(function: Any, given: tuple[Sequence[Any], Mapping[str, Any]]) -> str:
    """What a function returns that Dynamo called while tracing, and that a start calls again."""
    arguments, named = given
    try:
        return stable_text(function(*arguments, **named))
    except Undescribable:
        raise
    except Exception as error:  # no process group, …
        return f"raises {type(error).__name__}"


CALLED_OP, INLINED_OP, FUNCTION = "called op", "op", "function"

_OBSERVERS: dict[str, Callable[[Any, Any], Observation]] = {
    "value": lambda value, _: stable_text(value),
    "length": lambda value, _: f"{len(value)} items",
    "truth": lambda value, _: str(len(value) > 0),
    "keys": lambda value, _: f"keys {[stable_text(key) for key in value]}",
    "contains": lambda value, key: str(key_of(key) in value),
    "isinstance": lambda value, cls: str(isinstance(value, key_of(cls))),
    "issubclass": lambda value, cls: str(issubclass(value, key_of(cls))),
    "hasattr": lambda value, name: str(hasattr(value, name)),
    "in __dict__": lambda value, name: str(name in getattr(value, "__dict__", ())),
    "hooks": lambda value, _: f"{sum([len(getattr(value, name, ())) for name in HOOKS])} hooks",
    "code": _code,
    "added": _added,
    "result": _result,
    "names": lambda value, names: stable_text([n for n in names if n in vars(value)]),
    "attribute": _attribute,
    "calls": lambda value, _: stable_text(code_parts(unwrapped(value))),
    "members": lambda value, _: stable_text([[n, m.value] for n, m in value.__members__.items()]),
    "exists": lambda value, _: str(value is not None),
    CALLED_OP: lambda op, _: op_signature(op),
    INLINED_OP: lambda op, _: op_parts(op),
    FUNCTION: lambda function, _: code_parts(function),
}


_NAMED_KINDS = ("type", "length", "keys", "added", "result", "names", "calls", "members")
"""Kinds that a difference states after the place; of others it states the argument, if any."""


@dataclass
class _Node:
    value: Any
    conditions: list[list[Any]] = field(default_factory=list)
    below: dict[Any, tuple[Step, _Node]] = field(default_factory=dict)
    stated: set[Any] = field(default_factory=set)

    def then(self, step: Step) -> _Node:
        key = step if isinstance(step, str) else (step[0], _hashable(step[1]))
        if key not in self.below:
            self.below[key] = step, _Node(follow(self.value, step))
        return self.below[key][1]

    def name_classes(self, classes: _Classes) -> None:
        """State the classes here and below, in the order in which a check meets them."""
        for condition in self.conditions:
            if condition[0] == "type":
                condition[2] = classes.text(type(self.value))
            elif condition[0] == "value" and isinstance(self.value, type):
                condition[2] = classes.text(self.value)
        for _, inner in self.below.values():
            inner.name_classes(classes)


class _Classes:
    """The texts of classes. Of several with one name, each has a number, in the order in which they
    are met: which of them an object has decides `isinstance`."""

    def __init__(self) -> None:
        self.texts: dict[type, str] = {}
        """Of the classes that were asked for."""
        self._by_name: dict[str, dict[type, int]] = {}

    def text(self, cls: type) -> str:
        """`class_text` of a class, with the numbers of it and its bases."""
        if cls not in self.texts:
            numbers = [self._number(each) for each in cls.__mro__]
            self.texts[cls] = class_text(cls) + (f" {numbers}" if any(numbers) else "")
        return self.texts[cls]

    def _number(self, cls: type) -> int:
        same = self._by_name.setdefault(class_name(cls), {})
        return same.setdefault(cls, len(same))


def _hashable(argument: Any) -> Any:
    """What stands for an argument in the key of a dict: equal for equal JSON."""
    return argument if type(argument) in (str, types.NoneType) else canonical(argument)


class ConditionTree:
    """Collects the conditions of one trace."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._roots: dict[str, _Node] = {}
        self._same: list[Json] = []
        self._variables: dict[str, str | None] = {}

    def add(self, root: str, steps: Sequence[Step], kind: str, argument: Any = None) -> None:
        """A condition on the value that is at a place now; raises Undescribable."""
        if root not in self._roots:
            self._roots[root] = _Node(root_value(root, self._model))
        node = functools.reduce(_Node.then, steps, self._roots[root])
        if (identity := (kind, _hashable(argument))) in node.stated:
            return
        node.stated.add(identity)
        if node.value is MISSING:
            raise Undescribable(spelled(root, steps, self._model), "cannot be located")
        try:
            # what names a class is known when all classes are
            is_class = kind == "type" or (kind == "value" and isinstance(node.value, type))
            named = is_class or kind == IDENTITY
            observation = "" if named else observed(kind, argument, node.value)
        except Undescribable as error:
            where = spelled(root, steps, self._model) + error.where
            raise Undescribable(where, error.reason) from error
        node.conditions.append([kind, argument, observation])

    def same(self, one: tuple[str, Sequence[Step]], other: tuple[str, Sequence[Step]]) -> None:
        """The condition that two places hold one object."""
        for root, _ in (one, other):  # a check looks at the roots that it is given
            self._roots.setdefault(root, _Node(root_value(root, self._model)))
        self._same.append([[one[0], list(one[1])], [other[0], list(other[1])]])

    def variable(self, name: str) -> None:
        """The condition that an environment variable has the value it has now."""
        self._variables[name] = environment.observed(name)

    def data(self) -> dict[str, Json]:
        """All conditions as plain data for the meta of a bundle."""
        nodes: list[Json] = []
        numbers: dict[bytes, int] = {}
        classes = _Classes()
        for _, top in sorted(self._roots.items()):
            top.name_classes(classes)

        def number(node: _Node) -> int:
            below: list[Json] = [[step, number(inner)] for step, inner in node.below.values()]
            conditions: list[Json] = list(node.conditions)
            encoded: list[Json] = [conditions, below]
            identity = canonical(encoded)
            if identity not in numbers:
                numbers[identity] = len(nodes)
                nodes.append(encoded)
            return numbers[identity]

        roots: dict[str, Json] = {root: number(node) for root, node in self._roots.items()}
        variables: dict[str, Json] = dict(self._variables)
        data: dict[str, Json] = {"nodes": nodes, "roots": roots, "same": self._same}
        check = _Check(nodes, [])
        for root, number_of_top in sorted(roots.items()):
            for _ in check.walk(int(str(number_of_top)), root_value(root, self._model)):
                pass
        identities: list[Json] = list(check.identities)
        return {**data, "identities": identities, "environment": variables}


def broken_conditions(data: Any, model: torch.nn.Module) -> list[BrokenCondition]:
    """The conditions that do not hold in this process; empty if the bundle may be used."""
    try:
        return list(_broken(data, model))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        unreadable = f"unreadable ({type(error).__name__}: {error})"
        return [BrokenCondition("conditions", "recorded", unreadable)]


def _broken(data: Mapping[str, Any], model: torch.nn.Module) -> Iterator[BrokenCondition]:
    if TRACES in data:
        for trace in data[TRACES]:
            yield from _broken(trace, model)
        return
    yield from filter(None, checked(data, model, sorted(data["roots"])))
    for name, recorded in data["environment"].items():
        if (now := environment.observed(name)) != recorded:
            before, after = ("unset" if each is None else str(each) for each in (recorded, now))
            yield BrokenCondition(f"environment variable {name}", before, after)


def checked(
    data: Mapping[str, Any], model: torch.nn.Module, roots: Sequence[str] = (MODEL,)
) -> Iterator[BrokenCondition | None]:
    """Check the conditions at and below `roots`, by default those on the model itself.

    Yields those that do not hold, and None after each place, so that a check may go on later.
    """
    if TRACES in data:
        for trace in data[TRACES]:
            yield from checked(trace, model, roots)
        return
    check = _Check(data["nodes"], data["identities"])
    for root in roots:
        for _ in check.walk(data["roots"][root], root_value(root, model)):
            for steps, condition, new in check.taken():
                yield from _broken_at(spelled(root, steps, model), condition, new)
            yield None
    for one, other in data["same"]:
        if one[0] not in roots or other[0] not in roots:
            continue
        if reader(one[0], one[1], model)() is not reader(other[0], other[1], model)():
            first, second = (spelled(root, steps, model) for root, steps in (one, other))
            if other[1]:
                yield BrokenCondition(f"{first} and {second}", "one object", "two")
            else:  # the model or a module, by the place `one`
                yield BrokenCondition(first, f"{second} itself", "another object")


def _broken_at(name: str, condition: Any, new: Observation) -> Iterator[BrokenCondition]:
    kind, argument, old = condition
    if isinstance(old, dict):
        yield from _changed_parts(name, old, new if isinstance(new, dict) else {"": new})
        return
    shown = f" {kind}" if kind in _NAMED_KINDS else ""
    asked = argument is not None and kind not in _NAMED_KINDS
    about = f" {kind} {key_of(argument)!r}" if asked else ""
    yield BrokenCondition(f"{name}{about}{shown}", old, str(new))


def _changed_parts(
    name: str, old: Mapping[str, str], new: Mapping[str, str]
) -> Iterator[BrokenCondition]:
    for part in sorted({*old, *new}):
        before, after = old.get(part, "missing"), new.get(part, "missing")
        if before != after:
            yield BrokenCondition(f"{name}{part}", before, after)


class _Check:
    """Walks down the tree, compares each condition, and collects those that do not hold.

    It runs in every warm start, for thousands of conditions.
    """

    def __init__(self, nodes: Sequence[Any], identities: Sequence[int]) -> None:
        self._nodes = nodes
        self._recorded = identities
        self.identities: list[int] = []
        """Objects, numbered by the order in which they are first found, one for each IDENTITY."""
        self._numbers: dict[int, tuple[int, Any]] = {}  # kept alive so that ids are not reused
        self._classes = _Classes()
        self._class_texts = self._classes.texts
        self._broken_here: list[tuple[tuple[Step, ...], Any, Observation]] = []

    def taken(self) -> list[tuple[tuple[Step, ...], Any, Observation]]:
        """The steps, condition and observation of what did not hold since the last call."""
        broken, self._broken_here = self._broken_here, []
        return broken

    def walk(self, number: int, value: Any) -> Iterator[None]:
        """Check a node and those below it, in the order of the tree; yields after each."""
        left: list[tuple[int, Any, tuple[Step, ...]]] = [(number, value, ())]
        while left:
            number, value, path = left.pop()
            conditions, below = self._nodes[number]
            self._compare(conditions, value, path)
            for step, inner in reversed(below):
                left.append((inner, follow(value, step), (*path, step)))
            yield

    def _compare(self, conditions: Sequence[Any], value: Any, path: tuple[Step, ...]) -> None:
        cls = type(value)
        for condition in conditions:
            kind, argument, _ = condition
            if kind == "type" and value is not MISSING:
                new: Observation = self._class_texts.get(cls) or self._classes.text(cls)
            elif kind == "value" and cls in DATA:
                new = repr(value)
            elif kind == "value" and isinstance(value, type):
                new = self._classes.text(value)
            elif kind == IDENTITY:
                if self._is_as_recorded(value):
                    continue
                condition, new = [kind, argument, "the object it was"], "another"
            else:
                new = self._observed(kind, argument, value)
            if new != condition[2]:
                self._broken_here.append((path, condition, new))

    def _observed(self, kind: str, argument: Any, value: Any) -> Observation:
        try:
            return observed(kind, argument, value)
        except Undescribable as error:
            return f"undescribable: {error}"
        except Exception as error:  # the user's `__len__`, `__contains__`, … may raise anything
            return f"{type(error).__name__}: {error}"

    def _is_as_recorded(self, value: Any) -> bool:
        number, _ = self._numbers.setdefault(id(value), (len(self._numbers), value))
        place = len(self.identities)
        self.identities.append(number)
        return place >= len(self._recorded) or self._recorded[place] == number
