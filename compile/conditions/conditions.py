"""Conditions of a trace: recorded as data with a bundle, checked by value when it is loaded.

Conditions form a tree of places, so that each value is looked up once, and equal subtrees (the
layers of a model) are stored once. A condition is `[kind, argument, observation]`: what is observed
of the value at its place, and what was observed when the model was traced. See kinds.py.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...cache.keys import environment
from ...cache.keys.factors import Json, canonical
from .kinds import IDENTITY, KINDS, TYPE, VALUE, Observation
from .places import MISSING, MODEL, Step, follow, key_of, reader, root_value, spelled
from .values import Undescribable, class_name, class_text

_CODE = re.compile(r" <code \w+>")
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


class _Observer:
    """Observes values place by place, and numbers classes and objects in the order it meets them.

    Of several classes with one name, each has a number in its text: which of them an object has
    decides `isinstance`. Objects are numbered since Dynamo decides `a is b` without a guard: two
    places must hold one object exactly if they did in the trace. These numbers are stored apart
    from the tree, so that equal layers stay equal subtrees.
    """

    def __init__(self, recorded: Sequence[int] = ()) -> None:
        self._recorded = recorded
        self.identities: list[int] = []
        """The number of the object at each place with an IDENTITY."""
        self._objects: dict[int, tuple[int, Any]] = {}  # kept alive so that ids are not reused
        self._class_texts: dict[type, str] = {}
        self._classes: dict[str, dict[type, int]] = {}
        """Classes with one name, and their numbers."""

    def observe(self, kind: str, argument: Any, value: Any) -> Observation:
        """What a condition of `kind` observes of a value; raises Undescribable.

        It runs in every warm start, for thousands of conditions.
        """
        if kind == IDENTITY:
            return "" if self._is_as_recorded(value) else "another"
        if value is MISSING:
            return "missing"
        if kind == TYPE:
            return self._class_text(type(value))
        if kind == VALUE and isinstance(value, type):
            return self._class_text(value)
        return KINDS[kind].observe(value, argument)

    def _class_text(self, cls: type) -> str:
        if cls not in self._class_texts:
            numbers = [self._number(base) for base in cls.__mro__]
            self._class_texts[cls] = class_text(cls) + (f" {numbers}" if any(numbers) else "")
        return self._class_texts[cls]

    def _number(self, cls: type) -> int:
        same_name = self._classes.setdefault(class_name(cls), {})
        return same_name.setdefault(cls, len(same_name))

    def _is_as_recorded(self, value: Any) -> bool:
        number, _ = self._objects.setdefault(id(value), (len(self._objects), value))
        place = len(self.identities)
        self.identities.append(number)
        return place >= len(self._recorded) or self._recorded[place] == number


def _is_numbered(kind: str, value: Any) -> bool:
    """Whether an observation has numbers, which need all places of the tree."""
    return kind in (TYPE, IDENTITY) or (kind == VALUE and isinstance(value, type))


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

    def add_numbers(self, observer: _Observer) -> None:
        """Observe here and below what has numbers, in the order of a check."""
        for condition in self.conditions:
            kind, argument, _ = condition
            if _is_numbered(kind, self.value):
                condition[2] = observer.observe(kind, argument, self.value)
        for _, inner in self.below.values():
            inner.add_numbers(observer)


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

    def _root(self, root: str) -> _Node:
        if root not in self._roots:
            self._roots[root] = _Node(root_value(root, self._model))
        return self._roots[root]

    def add(self, root: str, steps: Sequence[Step], kind: str, argument: Any = None) -> None:
        """A condition on the value that is at a place now; raises Undescribable."""
        node = functools.reduce(_Node.then, steps, self._root(root))
        if (identity := (kind, _hashable(argument))) in node.stated:
            return
        node.stated.add(identity)
        try:
            if node.value is MISSING:
                raise Undescribable("", "cannot be located")
            is_numbered = _is_numbered(kind, node.value)
            observation = "" if is_numbered else KINDS[kind].observe(node.value, argument)
        except Undescribable as error:
            where = spelled(root, steps, self._model) + error.where
            raise Undescribable(where, error.reason) from error
        node.conditions.append([kind, argument, observation])

    def same(self, one: tuple[str, Sequence[Step]], other: tuple[str, Sequence[Step]]) -> None:
        """The condition that two places hold one object."""
        for root, _ in (one, other):  # a check looks at the roots of the tree
            self._root(root)
        self._same.append([[one[0], list(one[1])], [other[0], list(other[1])]])

    def variable(self, name: str) -> None:
        """The condition that an environment variable has the value it has now."""
        self._variables[name] = environment.observed(name)

    def data(self) -> dict[str, Json]:
        """All conditions as plain data for the meta of a bundle."""
        observer = _Observer()
        for _, top in sorted(self._roots.items()):
            top.add_numbers(observer)
        nodes: list[Json] = []
        numbers: dict[bytes, int] = {}

        def number(node: _Node) -> int:
            below: list[Json] = [[step, number(inner)] for step, inner in node.below.values()]
            conditions: list[Json] = list(node.conditions)
            encoded: list[Json] = [conditions, below]
            identity = canonical(encoded)
            if identity not in numbers:
                numbers[identity] = len(nodes)
                nodes.append(encoded)
            return numbers[identity]

        return {
            "nodes": nodes,
            "roots": {root: number(node) for root, node in self._roots.items()},
            "same": self._same,
            "identities": list(observer.identities),
            "environment": dict(self._variables),
        }


def broken_conditions(data: Any, model: torch.nn.Module) -> list[BrokenCondition]:
    """The conditions that do not hold in this process; empty if the bundle may be used."""
    try:
        return list(filter(None, checked(data, model, everywhere=True)))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        unreadable = f"unreadable ({type(error).__name__}: {error})"
        return [BrokenCondition("conditions", "recorded", unreadable)]


def checked(
    data: Mapping[str, Any], model: torch.nn.Module, everywhere: bool = False
) -> Iterator[BrokenCondition | None]:
    """Check the conditions on the model itself, or all: globals, classes, the environment, ….

    Yields those that do not hold, and None after each place, so that a check may go on later.
    """
    for trace in data.get(TRACES, [data]):
        yield from _checked(trace, model, sorted(trace["roots"]) if everywhere else [MODEL])
        for name, recorded in trace["environment"].items() if everywhere else ():
            if (now := environment.observed(name)) != recorded:
                old, new = ("unset" if value is None else str(value) for value in (recorded, now))
                yield BrokenCondition(f"environment variable {name}", old, new)


def _checked(
    data: Mapping[str, Any], model: torch.nn.Module, roots: Sequence[str]
) -> Iterator[BrokenCondition | None]:
    observer = _Observer(data["identities"])
    for root in roots:
        top = data["roots"][root], root_value(root, model)
        for steps, conditions, value in _places(data["nodes"], *top):
            for condition in conditions:
                if (new := _now(observer, condition, value)) != condition[2]:
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


def _places(
    nodes: Sequence[Any], number: int, value: Any
) -> Iterator[tuple[tuple[Step, ...], Sequence[Any], Any]]:
    """A node and those below it, in the order of the tree: steps, conditions, value."""
    left: list[tuple[int, Any, tuple[Step, ...]]] = [(number, value, ())]
    while left:
        number, value, steps = left.pop()
        conditions, below = nodes[number]
        yield steps, conditions, value
        for step, inner in reversed(below):
            left.append((inner, follow(value, step), (*steps, step)))


def _now(observer: _Observer, condition: Any, value: Any) -> Observation:
    try:
        return observer.observe(condition[0], condition[1], value)
    except Undescribable as error:
        return f"undescribable: {error}"
    except Exception as error:  # the user's `__len__`, `__contains__`, … may raise anything
        return f"{type(error).__name__}: {error}"


def _broken_at(name: str, condition: Any, new: Observation) -> Iterator[BrokenCondition]:
    kind, argument, old = condition
    if kind == IDENTITY:
        yield BrokenCondition(name, "the object it was", str(new))
    elif isinstance(old, dict):
        parts = new if isinstance(new, dict) else {"": new}
        for part in sorted({*old, *parts}):
            before, after = old.get(part, "missing"), parts.get(part, "missing")
            if before != after:
                yield BrokenCondition(f"{name}{part}", before, after)
    elif KINDS[kind].is_shown:
        yield BrokenCondition(f"{name} {kind}", old, str(new))
    else:
        about = f" {kind} {key_of(argument)!r}" if argument is not None else ""
        yield BrokenCondition(f"{name}{about}", old, str(new))
